//! Mixtures of experts (Shazeer et al., 2017): each token is computed by the k of E experts that a router chooses.
//!
//! ```text
//! RouterLogits    tokens -> logits, in F32
//! Route           logits -> k experts of each token, and their weights
//! SortByExpert    choices -> offsets of the experts, order of the rows
//! GatherRows      tokens -> N k rows, those of an expert side by side
//! Grouped*        rows of expert e times the weights of expert e
//! ExpertBias*     adds the biases of expert e to its rows
//! CombineRows     rows -> tokens: weighted sums
//! UpdateRouterBias    loads of a step -> biases of the next step's choices
//! ```
//! A choice is one of the N k pairs of a token and one of its experts, numbered `n k + j`. No choice is dropped. All
//! shapes are fixed: only the offsets, which stay on the device, tell how many rows each expert has.

pub(crate) mod bias;
pub(crate) mod grouped;
pub(crate) mod layer_bias;
mod logits;
pub(crate) mod route;
pub(crate) mod rows;
pub(crate) mod sort;

pub use bias::UpdateRouterBias;
pub use grouped::{
    GroupedBackwardInput, GroupedBackwardWeight, GroupedForward, GroupedFp8, GroupedProduct, GroupedShape,
};
pub use layer_bias::{ExpertBiasBackward, ExpertBiasForward};
pub use logits::RouterLogits;
pub use route::{BalanceLoss, RouteBackward, RouteForward, RouteShape, Router};
pub use rows::{CombineRows, CombineRowsBackward, GatherRows, GatherRowsBackward, RowsShape};
pub use sort::SortByExpert;

/// Maximum number of experts.
pub const MAX_EXPERTS: usize = 512;
/// Maximum number of experts that a token chooses: a warp has a lane for each.
pub const MAX_CHOSEN: usize = 32;

/// Converts an index in device memory. A negative one would fail the bounds check.
pub(crate) fn index(value: i32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX / (1 << 24))
}
