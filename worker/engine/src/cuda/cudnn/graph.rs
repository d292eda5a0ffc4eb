//! Operations on tensors, made into one plan: what the library calls an operation graph.
//!
//! A tensor is real (device memory that each execution names), a scalar (passed by value), or virtual: it exists inside
//! the plan's kernels only. The library knows a few patterns of operations and has kernels for these; anything else is
//! refused, and so is a known pattern in an unknown shape. All tensors here have four dimensions, sizes and strides in
//! elements.

use std::ffi::c_void;

use cudarc::cudnn::sys::{
    self, cudnnBackendAttributeName_t as Attribute, cudnnBackendDescriptorType_t as Kind,
    cudnnBackendHeurMode_t as HeurMode, cudnnDataType_t as DataType, cudnnHandle_t,
    cudnnPointwiseMode_t as Mode, cudnnReduceTensorOp_t as Reduce,
};

use super::descriptor::{Descriptor, Refusal};

/// Every address is at least a multiple of so many bytes.
const ALIGNMENT: i64 = 16;

/// Element type, sizes and strides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) element: DataType,
    pub(super) dims: [i64; 4],
    pub(super) strides: [i64; 4],
}

impl Layout {
    /// Without gaps, the last dimension first in memory.
    pub(super) fn dense(element: DataType, dims: [i64; 4]) -> Self {
        let [_, b, c, d] = dims;
        Self { element, dims, strides: [b * c * d, c * d, d, 1] }
    }

    /// With the last two dimensions exchanged, in the same memory.
    pub(super) fn transposed(mut self) -> Self {
        self.dims.swap(2, 3);
        self.strides.swap(2, 3);
        self
    }

    pub(super) fn of(self, element: DataType) -> Self {
        Self { element, ..self }
    }

    /// Bytes of a tensor without gaps.
    pub(super) fn bytes(self) -> usize {
        let size = if self.element == DataType::CUDNN_DATA_BFLOAT16 { 2 } else { 4 };
        usize::try_from(self.dims.iter().product::<i64>()).unwrap_or(0) * size
    }
}

/// A tensor of one graph.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tensor {
    id: i64,
    pub(super) layout: Layout,
}

/// What a plan is for.
#[derive(Debug)]
pub(super) enum Target {
    /// The device of this handle.
    Handle(cudnnHandle_t),
    /// A device that need not be there, by its properties.
    #[cfg(test)]
    Properties(Descriptor),
}

/// Operations in the order of the data's way, and their tensors.
#[derive(Debug, Default)]
pub(super) struct Graph {
    /// By id.
    tensors: Vec<Descriptor>,
    scalars: Vec<(Tensor, f32)>,
    /// What operations refer to.
    parts: Vec<Descriptor>,
    operations: Vec<Descriptor>,
}

impl Graph {
    /// A tensor in device memory.
    pub(super) fn real(&mut self, layout: Layout) -> Result<Tensor, Refusal> {
        self.tensor(layout, None)
    }

    /// A tensor that is never in memory.
    pub(super) fn hidden(&mut self, layout: Layout) -> Result<Tensor, Refusal> {
        self.tensor(layout, Some(Attribute::CUDNN_ATTR_TENSOR_IS_VIRTUAL))
    }

    /// One number.
    pub(super) fn scalar(&mut self, value: f32) -> Result<Tensor, Refusal> {
        let layout = Layout::dense(DataType::CUDNN_DATA_FLOAT, [1; 4]);
        let tensor = self.tensor(layout, Some(Attribute::CUDNN_ATTR_TENSOR_IS_BY_VALUE))?;
        self.scalars.push((tensor, value));
        Ok(tensor)
    }

    /// `c = a b`, for each of the first two dimensions, of which the second may be a divisor in b.
    pub(super) fn matmul(&mut self, a: Tensor, b: Tensor, c: Tensor) -> Result<(), Refusal> {
        let how = Descriptor::new(Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?;
        how.set(Attribute::CUDNN_ATTR_MATMUL_COMP_TYPE, &[DataType::CUDNN_DATA_FLOAT])?;
        let how = how.finalize()?;
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_MATMUL_ADESC, self.at(a))?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_MATMUL_BDESC, self.at(b))?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_MATMUL_CDESC, self.at(c))?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_MATMUL_DESC, std::slice::from_ref(&how))?;
        self.push(how, operation)
    }

    /// `y = mode(x, ...)`, smaller operands repeated.
    pub(super) fn pointwise(&mut self, mode: Mode, x: &[Tensor], y: Tensor) -> Result<(), Refusal> {
        self.pointwise_along(mode, None, x, y)
    }

    /// A hidden f32 tensor `mode(x, ...)` with the sizes of the first operand.
    pub(super) fn float(&mut self, mode: Mode, x: &[Tensor]) -> Result<Tensor, Refusal> {
        let y = self.hidden(x[0].layout.of(DataType::CUDNN_DATA_FLOAT))?;
        self.pointwise(mode, x, y)?;
        Ok(y)
    }

    /// The positions along one dimension of such a tensor.
    pub(super) fn positions(&mut self, axis: i64, like: Tensor) -> Result<Tensor, Refusal> {
        let y = self.hidden(like.layout.of(DataType::CUDNN_DATA_INT32))?;
        self.pointwise_along(Mode::CUDNN_POINTWISE_GEN_INDEX, Some(axis), &[like], y)?;
        Ok(y)
    }

    fn pointwise_along(
        &mut self,
        mode: Mode,
        axis: Option<i64>,
        x: &[Tensor],
        y: Tensor,
    ) -> Result<(), Refusal> {
        let computed = match y.layout.element {
            DataType::CUDNN_DATA_BOOLEAN => DataType::CUDNN_DATA_BOOLEAN,
            _ => DataType::CUDNN_DATA_FLOAT,
        };
        let how = Descriptor::new(Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?;
        how.set(Attribute::CUDNN_ATTR_POINTWISE_MODE, &[mode])?;
        how.set(Attribute::CUDNN_ATTR_POINTWISE_MATH_PREC, &[computed])?;
        if let Some(axis) = axis {
            how.set(Attribute::CUDNN_ATTR_POINTWISE_AXIS, &[axis])?;
        }
        let how = how.finalize()?;
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, std::slice::from_ref(&how))?;
        let operands = [
            Attribute::CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
            Attribute::CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
            Attribute::CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
        ];
        for (attribute, x) in operands.into_iter().zip(x) {
            operation.set(attribute, self.at(*x))?;
        }
        operation.set(Attribute::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, self.at(y))?;
        self.push(how, operation)
    }

    /// `y = x` reduced along the dimensions in which y has size 1, or fewer elements than x.
    pub(super) fn reduce(&mut self, operator: Reduce, x: Tensor, y: Tensor) -> Result<(), Refusal> {
        let how = Descriptor::new(Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?;
        how.set(Attribute::CUDNN_ATTR_REDUCTION_OPERATOR, &[operator])?;
        how.set(Attribute::CUDNN_ATTR_REDUCTION_COMP_TYPE, &[DataType::CUDNN_DATA_FLOAT])?;
        let how = how.finalize()?;
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_REDUCTION_DESC, std::slice::from_ref(&how))?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, self.at(x))?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, self.at(y))?;
        self.push(how, operation)
    }

    /// A hidden tensor: x with its last two dimensions exchanged, as this element type.
    pub(super) fn transpose(&mut self, x: Tensor, element: DataType) -> Result<Tensor, Refusal> {
        let y = self.hidden(x.layout.transposed().of(element))?;
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, self.at(x))?;
        operation.set(Attribute::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, self.at(y))?;
        self.operations.push(operation.finalize()?);
        Ok(y)
    }

    /// The first plan of those that the library thinks fastest which it can also build. Takes up to seconds.
    pub(super) fn plan(self, target: &Target) -> Result<Plan, Refusal> {
        let graph = Descriptor::new(Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        graph.set(Attribute::CUDNN_ATTR_OPERATIONGRAPH_OPS, &self.operations)?;
        let ranking = Descriptor::new(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
        match target {
            Target::Handle(handle) => graph.set(Attribute::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, &[*handle])?,
            #[cfg(test)]
            Target::Properties(device) => {
                ranking.set(Attribute::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, std::slice::from_ref(device))?;
            }
        }
        let graph = graph.finalize()?;
        ranking.set(Attribute::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, std::slice::from_ref(&graph))?;
        ranking.set(Attribute::CUDNN_ATTR_ENGINEHEUR_MODE, &[HeurMode::CUDNN_HEUR_MODE_A])?;
        let ranking = ranking.finalize()?;
        let results = Attribute::CUDNN_ATTR_ENGINEHEUR_RESULTS;
        let mut configurations = (0..ranking.get::<Descriptor>(results, &mut [])?)
            .map(|_| Descriptor::new(Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR))
            .collect::<Result<Vec<_>, _>>()?;
        let found = ranking.get(results, &mut configurations)?;
        configurations.truncate(found);
        let mut refusal = Refusal::new("CUDNN_ATTR_ENGINEHEUR_RESULTS", "no engine for these operations");
        for configuration in configurations {
            match build(&configuration) {
                Ok((plan, workspace)) => {
                    let Self { tensors, scalars, parts, operations } = self;
                    let mut kept = vec![configuration, ranking, graph];
                    kept.extend(operations.into_iter().chain(parts).chain(tensors));
                    return Ok(Plan { plan, workspace, scalars, kept });
                }
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }

    fn tensor(&mut self, layout: Layout, property: Option<Attribute>) -> Result<Tensor, Refusal> {
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
        // Ids count up from 0.
        std::slice::from_ref(&self.tensors[tensor.id as usize])
    }

    fn push(&mut self, how: Descriptor, operation: Descriptor) -> Result<(), Refusal> {
        self.operations.push(operation.finalize()?);
        self.parts.push(how);
        Ok(())
    }
}

/// A plan of this configuration, and the bytes of its workspace.
fn build(configuration: &Descriptor) -> Result<(Descriptor, usize), Refusal> {
    let plan = Descriptor::new(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
    let from = std::slice::from_ref(configuration);
    plan.set(Attribute::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, from)?;
    let plan = plan.finalize()?;
    let mut bytes = [0_i64];
    plan.get(Attribute::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, &mut bytes)?;
    Ok((plan, usize::try_from(bytes[0]).unwrap_or(0)))
}

/// Kernels that do a graph's operations.
#[derive(Debug)]
pub(super) struct Plan {
    plan: Descriptor,
    /// Bytes that it writes and reads while it runs.
    pub(super) workspace: usize,
    scalars: Vec<(Tensor, f32)>,
    /// What the plan was made from, each before those that it refers to.
    #[expect(dead_code, reason = "the plan refers to them")]
    kept: Vec<Descriptor>,
}

impl Plan {
    /// Enqueues the plan to the handle's stream.
    ///
    /// # Safety
    /// The plan was made for this handle. Every real tensor of its graph is given with the address of memory laid out
    /// as the tensor, and `workspace` is the address of as many bytes as the plan wants; all of it stays allocated until
    /// the stream has passed this point.
    pub(super) unsafe fn execute(
        &self,
        handle: cudnnHandle_t,
        tensors: &[(Tensor, u64)],
        workspace: u64,
    ) -> Result<(), Refusal> {
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
        // SAFETY: handle, plan and pack are alive; the rest is the caller's promise. Scalars are read by this call.
        let status = unsafe { sys::cudnnBackendExecute(handle, self.plan.raw(), pack.raw()) };
        Refusal::check("cudnnBackendExecute", status)
    }
}
