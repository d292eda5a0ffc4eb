//! Makes cuBLASLt load its tables in advance: the first request for algorithms takes 0.3 s.

use std::sync::Arc;
use std::thread::JoinHandle;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{cublasComputeType_t, cudaDataType};
use cudarc::driver::CudaContext;

/// Rows and columns of the matrices in the request; the value does not matter.
const SIZE: u32 = 256;

/// Starts the request on a separate thread. If there is no thread, or the request fails, the first use takes longer.
pub(super) fn start(context: &Arc<CudaContext>) -> Option<JoinHandle<()>> {
    let context = context.clone();
    let request = move || {
        let _ = context.bind_to_thread().is_ok_and(|()| request().is_ok());
    };
    std::thread::Builder::new().name("cublaslt".into()).spawn(request).ok()
}

/// Requests the algorithms of a matrix multiplication, with the context current.
fn request() -> Result<(), CublasError> {
    let handle = result::create_handle()?;
    let description =
        result::create_matmul_desc(cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F)?;
    let layout =
        result::create_matrix_layout(cudaDataType::CUDA_R_16BF, SIZE.into(), SIZE.into(), SIZE.into())?;
    let preference = result::create_matmul_pref()?;
    // SAFETY: all objects were created above and are alive; each is destroyed once, after its last use.
    unsafe {
        let found = result::get_matmul_algo_heuristic(
            handle,
            description,
            layout,
            layout,
            layout,
            layout,
            preference,
        );
        result::destroy_matmul_pref(preference)?;
        result::destroy_matrix_layout(layout)?;
        result::destroy_matmul_desc(description)?;
        result::destroy_handle(handle)?;
        found.map(drop)
    }
}
