//! Operation graphs, and the execution plans that the library builds from them.
//!
//! A tensor is real (device memory whose address is passed to each execution), a scalar (passed by value), or virtual
//! (it exists only inside the plan's kernels). The library has kernels for a few patterns of operations in some shapes
//! and rejects everything else. All tensors here have four dimensions, with sizes and strides in elements.

use std::ffi::c_void;

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Attribute, cudnnBackendDescriptorType_t as Kind,
    cudnnBackendHeurMode_t as HeurMode, cudnnDataType_t as DataType, cudnnHandle_t,
    cudnnPointwiseMode_t as Mode, cudnnReduceTensorOp_t as Reduce,
};

use super::descriptor::{CudnnError, Descriptor, library};

/// Minimum alignment of every address, in bytes.
const ALIGNMENT: i64 = 16;

/// Element type, sizes and strides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) element: DataType,
    pub(crate) dims: [i64; 4],
    pub(crate) strides: [i64; 4],
}

impl Layout {
    /// Row-major layout without gaps.
    pub(crate) fn dense(element: DataType, dims: [i64; 4]) -> Self {
        let [_, b, c, d] = dims;
        Self { element, dims, strides: [b * c * d, c * d, d, 1] }
    }

    /// Transposes the last two dimensions, in the same memory.
    pub(crate) fn transposed(mut self) -> Self {
        self.dims.swap(2, 3);
        self.strides.swap(2, 3);
        self
    }

    pub(crate) fn of(self, element: DataType) -> Self {
        Self { element, ..self }
    }

    /// Returns the size in bytes of a tensor without gaps.
    pub(crate) fn bytes(self) -> usize {
        let size = if self.element == DataType::CUDNN_DATA_BFLOAT16 { 2 } else { 4 };
        usize::try_from(self.dims.iter().product::<i64>()).unwrap_or(0) * size
    }
}

/// A tensor of one graph.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensor {
    id: i64,
    pub(crate) layout: Layout,
}

/// The device that a plan is built for.
#[derive(Debug)]
pub(crate) enum Target {
    /// The device of this handle.
    Handle(cudnnHandle_t),
    /// A device that need not be present, described by its properties. For tests.
    Properties(Descriptor),
}

/// Operations in data-flow order, with their tensors.
#[derive(Debug, Default)]
pub(crate) struct Graph {
    /// Descriptors of tensors, indexed by id.
    tensors: Vec<Descriptor>,
    /// Scalars and the bits of their values.
    scalars: Vec<(Tensor, u32)>,
    /// Descriptors that operations refer to.
    parts: Vec<Descriptor>,
    operations: Vec<Descriptor>,
}

impl Graph {
    /// Adds a tensor in device memory.
    pub(crate) fn real(&mut self, layout: Layout) -> Result<Tensor, CudnnError> {
        self.tensor(layout, None)
    }

    /// Adds a virtual tensor.
    pub(crate) fn virtual_tensor(&mut self, layout: Layout) -> Result<Tensor, CudnnError> {
        self.tensor(layout, Some(Attribute::CUDNN_ATTR_TENSOR_IS_VIRTUAL))
    }

    /// Adds a scalar, which is passed by value.
    pub(crate) fn scalar(&mut self, value: f32) -> Result<Tensor, CudnnError> {
        self.scalar_of(DataType::CUDNN_DATA_FLOAT, value.to_bits())
    }

    /// Adds an integer scalar, which is passed by value.
    pub(crate) fn integer(&mut self, value: i32) -> Result<Tensor, CudnnError> {
        self.scalar_of(DataType::CUDNN_DATA_INT32, value.cast_unsigned())
    }

    fn scalar_of(&mut self, element: DataType, bits: u32) -> Result<Tensor, CudnnError> {
        let layout = Layout::dense(element, [1; 4]);
        let tensor = self.tensor(layout, Some(Attribute::CUDNN_ATTR_TENSOR_IS_BY_VALUE))?;
        self.scalars.push((tensor, bits));
        Ok(tensor)
    }

    /// `c = a b`, batched over the first two dimensions; the second dimension (heads) of b may be a divisor of a's.
    pub(crate) fn matmul(&mut self, a: Tensor, b: Tensor, c: Tensor) -> Result<(), CudnnError> {
        let descriptor = Descriptor::new(Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?;
        descriptor.set(Attribute::CUDNN_ATTR_MATMUL_COMP_TYPE, &[DataType::CUDNN_DATA_FLOAT])?;
        let descriptor = descriptor.finalize()?;
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_MATMUL_ADESC, self.at(a))?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_MATMUL_BDESC, self.at(b))?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_MATMUL_CDESC, self.at(c))?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_MATMUL_DESC, std::slice::from_ref(&descriptor))?;
        self.push(descriptor, operation)
    }

    /// `y = mode(x, ...)`, with smaller operands broadcast.
    pub(crate) fn pointwise(&mut self, mode: Mode, x: &[Tensor], y: Tensor) -> Result<(), CudnnError> {
        self.pointwise_along(mode, None, x, y)
    }

    /// Adds a virtual f32 tensor `mode(x, ...)` with the sizes of the first operand.
    pub(crate) fn pointwise_f32(&mut self, mode: Mode, x: &[Tensor]) -> Result<Tensor, CudnnError> {
        let y = self.virtual_tensor(x[0].layout.of(DataType::CUDNN_DATA_FLOAT))?;
        self.pointwise(mode, x, y)?;
        Ok(y)
    }

    /// Adds a virtual tensor of the indices along one dimension of `like`.
    pub(crate) fn indices(&mut self, axis: i64, like: Tensor) -> Result<Tensor, CudnnError> {
        let y = self.virtual_tensor(like.layout.of(DataType::CUDNN_DATA_INT32))?;
        self.pointwise_along(Mode::CUDNN_POINTWISE_GEN_INDEX, Some(axis), &[like], y)?;
        Ok(y)
    }

    fn pointwise_along(
        &mut self,
        mode: Mode,
        axis: Option<i64>,
        x: &[Tensor],
        y: Tensor,
    ) -> Result<(), CudnnError> {
        let precision = match y.layout.element {
            DataType::CUDNN_DATA_BOOLEAN => DataType::CUDNN_DATA_BOOLEAN,
            DataType::CUDNN_DATA_INT32 if mode != Mode::CUDNN_POINTWISE_GEN_INDEX => {
                DataType::CUDNN_DATA_INT32
            }
            _ => DataType::CUDNN_DATA_FLOAT,
        };
        let descriptor = Descriptor::new(Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?;
        descriptor.set(Attribute::CUDNN_ATTR_POINTWISE_MODE, &[mode])?;
        descriptor.set(Attribute::CUDNN_ATTR_POINTWISE_MATH_PREC, &[precision])?;
        if let Some(axis) = axis {
            descriptor.set(Attribute::CUDNN_ATTR_POINTWISE_AXIS, &[axis])?;
        }
        let descriptor = descriptor.finalize()?;
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?;
        operation.set(
            Attribute::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR,
            std::slice::from_ref(&descriptor),
        )?;
        let operands = [
            Attribute::CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
            Attribute::CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
            Attribute::CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
        ];
        for (attribute, x) in operands.into_iter().zip(x) {
            operation.set(attribute, self.at(*x))?;
        }
        operation.set(Attribute::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, self.at(y))?;
        self.push(descriptor, operation)
    }

    /// `y = x`, reduced along the dimensions in which y has size 1 or fewer elements than x.
    pub(crate) fn reduce(&mut self, operator: Reduce, x: Tensor, y: Tensor) -> Result<(), CudnnError> {
        let descriptor = Descriptor::new(Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?;
        descriptor.set(Attribute::CUDNN_ATTR_REDUCTION_OPERATOR, &[operator])?;
        descriptor.set(Attribute::CUDNN_ATTR_REDUCTION_COMP_TYPE, &[DataType::CUDNN_DATA_FLOAT])?;
        let descriptor = descriptor.finalize()?;
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_REDUCTION_DESC, std::slice::from_ref(&descriptor))?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, self.at(x))?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, self.at(y))?;
        self.push(descriptor, operation)
    }

    /// Adds a virtual tensor: x with its last two dimensions transposed, in this element type.
    pub(crate) fn transpose(&mut self, x: Tensor, element: DataType) -> Result<Tensor, CudnnError> {
        let y = self.virtual_tensor(x.layout.transposed().of(element))?;
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, self.at(x))?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, self.at(y))?;
        self.operations.push(operation.finalize()?);
        Ok(y)
    }

    /// Builds the first plan, in the order of the library's heuristic, that the library can build. Takes up to several
    /// seconds.
    pub(crate) fn plan(self, target: &Target) -> Result<Plan, CudnnError> {
        let graph = Descriptor::new(Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        graph.set(Attribute::CUDNN_ATTR_OPERATIONGRAPH_OPS, &self.operations)?;
        let heuristic = Descriptor::new(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
        match target {
            Target::Handle(handle) => graph.set(Attribute::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, &[*handle])?,
            Target::Properties(device) => {
                heuristic.set(Attribute::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, std::slice::from_ref(device))?;
            }
        }
        let graph = graph.finalize()?;
        heuristic.set(Attribute::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, std::slice::from_ref(&graph))?;
        heuristic.set(Attribute::CUDNN_ATTR_ENGINEHEUR_MODE, &[HeurMode::CUDNN_HEUR_MODE_A])?;
        let heuristic = heuristic.finalize()?;
        let results = Attribute::CUDNN_ATTR_ENGINEHEUR_RESULTS;
        let mut configurations = (0..heuristic.get::<Descriptor>(results, &mut [])?)
            .map(|_| Descriptor::new(Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR))
            .collect::<Result<Vec<_>, _>>()?;
        let found = heuristic.get(results, &mut configurations)?;
        configurations.truncate(found);
        let mut last_error =
            CudnnError::new("CUDNN_ATTR_ENGINEHEUR_RESULTS", "no engine for these operations");
        for configuration in configurations {
            match build(&configuration) {
                Ok((plan, workspace)) => {
                    let Self { tensors, scalars, parts, operations } = self;
                    let mut kept = vec![configuration, heuristic, graph];
                    kept.extend(operations.into_iter().chain(parts).chain(tensors));
                    return Ok(Plan { plan, workspace, scalars, kept });
                }
                Err(error) => last_error = error,
            }
        }
        Err(last_error)
    }

    fn tensor(&mut self, layout: Layout, property: Option<Attribute>) -> Result<Tensor, CudnnError> {
        let id = self.tensors.len() as i64;
        let tensor = Descriptor::new(Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[id])?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_DATA_TYPE, &[layout.element])?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_DIMENSIONS, &layout.dims)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_STRIDES, &layout.strides)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[ALIGNMENT])?;
        if let Some(property) = property {
            tensor.set(property, &[true])?;
        }
        self.tensors.push(tensor.finalize()?);
        Ok(Tensor { id, layout })
    }

    fn at(&self, tensor: Tensor) -> &[Descriptor] {
        // Ids are consecutive, starting at 0.
        std::slice::from_ref(&self.tensors[tensor.id as usize])
    }

    fn push(&mut self, descriptor: Descriptor, operation: Descriptor) -> Result<(), CudnnError> {
        self.operations.push(operation.finalize()?);
        self.parts.push(descriptor);
        Ok(())
    }
}

/// Builds the plan of this engine configuration. Also returns the size of its workspace in bytes.
fn build(configuration: &Descriptor) -> Result<(Descriptor, usize), CudnnError> {
    let plan = Descriptor::new(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
    let from = std::slice::from_ref(configuration);
    plan.set(Attribute::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, from)?;
    let plan = plan.finalize()?;
    let mut bytes = [0_i64];
    plan.get(Attribute::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, &mut bytes)?;
    Ok((plan, usize::try_from(bytes[0]).unwrap_or(0)))
}

/// Kernels that execute a graph.
#[derive(Debug)]
pub(crate) struct Plan {
    plan: Descriptor,
    /// Scratch memory needed during execution, in bytes.
    pub(crate) workspace: usize,
    scalars: Vec<(Tensor, u32)>,
    /// Descriptors that the plan was built from. Each one precedes those that it refers to, which is the order of
    /// destruction.
    #[expect(dead_code, reason = "the plan refers to them")]
    kept: Vec<Descriptor>,
}

impl Plan {
    /// Enqueues the plan to the handle's stream.
    ///
    /// # Safety
    /// The plan was built for this handle. `tensors` has every real tensor of its graph with the address of memory of
    /// the tensor's layout, and `workspace` is the address of as many bytes as the plan needs; all of it stays
    /// allocated until the stream has passed this point.
    pub(crate) unsafe fn execute(
        &self,
        handle: cudnnHandle_t,
        tensors: &[(Tensor, u64)],
        workspace: u64,
    ) -> Result<(), CudnnError> {
        let ids: Vec<i64> = tensors
            .iter()
            .map(|(tensor, _)| tensor.id)
            .chain(self.scalars.iter().map(|(t, _)| t.id))
            .collect();
        let scalars =
            self.scalars.iter().map(|(_, value)| std::ptr::from_ref(value).cast_mut().cast::<c_void>());
        let addresses: Vec<*mut c_void> =
            tensors.iter().map(|(_, address)| *address as *mut c_void).chain(scalars).collect();
        let pack = Descriptor::new(Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        pack.set(Attribute::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &ids)?;
        pack.set(Attribute::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &addresses)?;
        pack.set(Attribute::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, &[workspace as *mut c_void])?;
        let pack = pack.finalize()?;
        // SAFETY: handle, plan and pack are alive; scalars are read during the call; the rest is the caller's promise.
        let status = unsafe { (library()?.execute)(handle, self.plan.raw(), pack.raw()) };
        CudnnError::check("cudnnBackendExecute", status)
    }
}
