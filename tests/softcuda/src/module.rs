//! Modules of PTX, their functions, and launches.
#![allow(unsafe_code, reason = "reads what the caller's pointers name")]

use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;

use crate::call::{abort, say};
use crate::device::{MAX_BLOCK, MAX_GRID, MAX_SHARED, MAX_THREADS};
use crate::error::{
    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_INVALID_PTX,
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND, CUDA_ERROR_NOT_SUPPORTED, Outcome,
};
use crate::memory::{KernelMemory, Use};
use crate::ptx::{self, Fault};
use crate::state::{Handle, State};
use crate::stream::{self, Work};

/// A loaded module.
pub(crate) struct Module {
    pub(crate) context: Handle,
    code: Arc<ptx::Module>,
}

/// A kernel of a module.
pub(crate) struct Function {
    pub(crate) context: Handle,
    module: Handle,
    code: Arc<ptx::Module>,
    name: String,
}

/// A kernel on its way.
pub(crate) struct Launch {
    code: Arc<ptx::Module>,
    name: String,
    grid: [u32; 3],
    block: [u32; 3],
    params: Vec<u8>,
    /// What its parameters point at.
    _uses: Vec<Use>,
}

impl Function {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

impl Launch {
    /// Of its kernel.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Runs it.
    pub(crate) fn run(&self, memory: &KernelMemory) -> Result<(), Fault> {
        match self.code.kernel(&self.name) {
            Some(kernel) => kernel.run(self.grid, self.block, &self.params, memory),
            None => abort("a function outlived its kernel"),
        }
    }
}

/// `cuModuleLoadData`.
///
/// # Safety
/// `image` is null or points at text that ends with a zero byte.
pub(crate) unsafe fn load(
    state: &mut State,
    context: Handle,
    image: *const c_void,
) -> Outcome<Handle> {
    if image.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller promises a text with its end.
    let text = unsafe { CStr::from_ptr(image.cast()) };
    let text = text.to_str().map_err(|_| CUDA_ERROR_INVALID_IMAGE)?;
    let code = ptx::Module::parse(text).map_err(|reason| {
        say(&format!("cuModuleLoadData: {reason}"));
        CUDA_ERROR_INVALID_PTX
    })?;
    let handle = state.new_handle();
    let code = Arc::new(code);
    state.modules.insert(handle, Module { context, code });
    Ok(handle)
}

/// `cuModuleUnload`: its functions become invalid; running launches keep their code.
pub(crate) fn unload(state: &mut State, context: Handle, module: Handle) -> Outcome {
    find(state, context, module)?;
    state.modules.remove(&module);
    state
        .functions
        .retain(|_, function| function.module != module);
    Ok(())
}

/// `cuModuleGetFunction`.
///
/// # Safety
/// `name` is null or points at text that ends with a zero byte.
pub(crate) unsafe fn function(
    state: &mut State,
    context: Handle,
    module: Handle,
    name: *const c_char,
) -> Outcome<Handle> {
    let code = Arc::clone(&find(state, context, module)?.code);
    if name.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller promises a text with its end.
    let name = unsafe { CStr::from_ptr(name) };
    let name = name.to_str().map_err(|_| CUDA_ERROR_NOT_FOUND)?.to_owned();
    code.kernel(&name).ok_or(CUDA_ERROR_NOT_FOUND)?;
    let handle = state.new_handle();
    let function = Function {
        context,
        module,
        code,
        name,
    };
    state.functions.insert(handle, function);
    Ok(handle)
}

/// `cuLaunchKernel`, with the parameters as an array of pointers.
///
/// # Safety
/// `params` points at as many pointers as the kernel has parameters, each to a value of its
/// parameter's size.
#[allow(clippy::too_many_arguments, reason = "the driver's own list")]
pub(crate) unsafe fn launch(
    state: &mut State,
    context: Handle,
    function: Handle,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: Handle,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Outcome {
    stream::check(state, context, stream)?;
    let function = state.functions.get(&function);
    let function = function
        .filter(|function| function.context == context)
        .ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    if !extra.is_null() {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    let fits = |dims: [u32; 3], most: [u32; 3]| {
        dims.iter()
            .zip(most)
            .all(|(&dim, most)| (1..=most).contains(&dim))
    };
    let threads: u64 = block.iter().map(|&dim| u64::from(dim)).product();
    if !fits(grid, MAX_GRID)
        || !fits(block, MAX_BLOCK)
        || threads > u64::from(MAX_THREADS)
        || shared > MAX_SHARED
    {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let code = Arc::clone(&function.code);
    let kernel = code
        .kernel(&function.name)
        .ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    if params.is_null() && !kernel.params().is_empty() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let (mut buffer, mut uses) = (Vec::new(), Vec::new());
    for (index, &size) in kernel.params().iter().enumerate() {
        // A parameter lies at a multiple of its size; the only aggregates that are no power of two
        // hold words of 8.
        let align = if size.is_power_of_two() {
            size.min(16)
        } else {
            8
        };
        buffer.resize(buffer.len().next_multiple_of(align), 0);
        // SAFETY: the caller promises a pointer for each parameter.
        let value = unsafe { *params.add(index) }.cast::<u8>();
        if value.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller promises a value of this size.
        let value = unsafe { std::slice::from_raw_parts(value, size) };
        if let Ok(word) = value.try_into() {
            uses.extend(state.memory.pointed_at(u64::from_ne_bytes(word)));
        }
        buffer.extend_from_slice(value);
    }
    let launch = Launch {
        name: function.name.clone(),
        code,
        grid,
        block,
        params: buffer,
        _uses: uses,
    };
    stream::submit(state, stream, Work::Launch(launch));
    Ok(())
}

impl ptx::Memory for KernelMemory {
    fn load(&self, address: u64, into: &mut [u8]) -> Result<(), Fault> {
        let len = into.len();
        let from = self.read(address, len).ok_or(Fault { address, len })?;
        // SAFETY: the access lies inside of a region that stays mapped while it is in use.
        unsafe { stream::move_bytes(from, into.as_mut_ptr().expose_provenance(), len) };
        Ok(())
    }

    fn store(&self, address: u64, from: &[u8]) -> Result<(), Fault> {
        let len = from.len();
        let to = self.write(address, len).ok_or(Fault { address, len })?;
        // SAFETY: as for loads.
        unsafe {
            stream::move_bytes(from.as_ptr().expose_provenance(), to, len);
            if self.wrong {
                stream::spoil(to, len);
            }
        }
        Ok(())
    }
}

fn find(state: &State, context: Handle, module: Handle) -> Outcome<&Module> {
    let module = state.modules.get(&module);
    module
        .filter(|module| module.context == context)
        .ok_or(CUDA_ERROR_INVALID_HANDLE)
}
