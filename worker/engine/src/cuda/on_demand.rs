//! Kernels that are compiled on first use, because their macros depend on more than the precision, such as a head width
//! or an activation function.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::Hash;

use cudarc::driver::CudaFunction;

use super::compile::{Macro, Source};
use super::launch::{Arg, Kernels, Launch};
use crate::error::{EngineError, Result};

/// A source, its macros, and the names of its kernels.
pub(crate) type Compilation = (Source, Vec<Macro>, Vec<&'static str>);

/// The kernels loaded so far, by name and by the key that determines their macros.
#[derive(Debug)]
pub(crate) struct OnDemand<K>(RefCell<HashMap<(K, &'static str), CudaFunction>>);

impl<K> Default for OnDemand<K> {
    fn default() -> Self {
        Self(RefCell::default())
    }
}

impl<K: Copy + Eq + Hash> OnDemand<K> {
    /// Enqueues a kernel. The first use of a key compiles or loads all kernels of its source.
    ///
    /// # Safety
    /// Same as for [`Kernels::launch`].
    pub(crate) unsafe fn launch(
        &self,
        kernels: &Kernels,
        (key, name): (K, &'static str),
        compilation: impl FnOnce(K) -> Compilation,
        launch: Launch,
        args: &[Arg],
    ) -> Result<()> {
        let loaded = self.0.borrow().get(&(key, name)).cloned();
        let function = match loaded {
            Some(function) => function,
            None => self.load(kernels, (key, name), compilation(key))?,
        };
        // SAFETY: the caller's promise.
        unsafe { kernels.launch_function(name, &function, launch, args) }
    }

    fn load(
        &self,
        kernels: &Kernels,
        (key, name): (K, &'static str),
        (source, macros, names): Compilation,
    ) -> Result<CudaFunction> {
        let functions = kernels.load(source, &macros, &names)?;
        let found = functions.get(name).cloned().ok_or_else(|| EngineError::no_kernel(name))?;
        let functions = functions.into_iter().map(|(name, function)| ((key, name), function));
        self.0.borrow_mut().extend(functions);
        Ok(found)
    }
}
