//! Tensors of the host, from torch.
//!
//! Only a tensor's attributes are read, so this is not built against torch. During a call, whose
//! arguments keep it alive, the memory within its sizes may be read (or written, for an output);
//! everything else about it is checked.
#![allow(unsafe_code, reason = "addresses come from Python as numbers")]

use std::ptr::with_exposed_provenance_mut;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use ucm_core::{DType, Error, Result};
use ucm_retrieval::{Blocks, Element, Ints, Vectors};

/// A tensor: its address, and its strides in elements.
pub(crate) struct Tensor {
    address: usize,
    on_host: bool,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) strides: Vec<usize>,
}

impl<'a, 'py> FromPyObject<'a, 'py> for Tensor {
    type Error = PyErr;

    fn extract(tensor: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let py = tensor.py();
        Ok(Self {
            address: tensor.call_method0(intern!(py, "data_ptr"))?.extract()?,
            on_host: tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()?,
            dtype: tensor.getattr(intern!(py, "dtype"))?.str()?.to_string(),
            shape: sizes(&tensor.getattr(intern!(py, "shape"))?)?,
            strides: sizes(&tensor.call_method0(intern!(py, "stride"))?)?,
        })
    }
}

fn sizes(tuple: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let tuple = tuple.cast::<PyTuple>()?;
    tuple.iter().map(|size| size.extract()).collect()
}

impl Tensor {
    pub(crate) fn wrong(&self, name: &'static str, what: &'static str) -> Error {
        let error = Error::invalid(what)
            .with("argument", name)
            .with("dtype", &self.dtype);
        error
            .with("shape", format!("{:?}", self.shape))
            .with("strides", format!("{:?}", self.strides))
    }

    /// Its `N` sizes.
    pub(crate) fn sizes<const N: usize>(&self, name: &'static str) -> Result<[usize; N]> {
        let sizes = self
            .shape
            .as_slice()
            .try_into()
            .ok()
            .filter(|_| self.strides.len() == N);
        sizes.ok_or_else(|| {
            self.wrong(name, "a tensor has another number of dimensions")
                .with("expected", N)
        })
    }

    /// True if the dimensions from `first` on have no gaps.
    pub(crate) fn packed_from(&self, first: usize) -> bool {
        let mut expected = 1;
        for (&size, &stride) in self.shape.iter().zip(&self.strides).skip(first).rev() {
            if size > 1 && stride != expected {
                return false;
            }
            expected *= size;
        }
        true
    }

    /// `what` is wrong unless something holds.
    pub(crate) fn require(
        &self,
        name: &'static str,
        holds: bool,
        what: &'static str,
    ) -> Result<()> {
        if holds {
            return Ok(());
        }
        Err(self.wrong(name, what))
    }

    pub(crate) fn packed(&self, name: &'static str, first: usize) -> Result<()> {
        let gaps = "the last dimensions of a tensor have gaps";
        let required = self.require(name, self.packed_from(first), gaps);
        required.map_err(|error| error.with("from", first))
    }

    pub(crate) fn is(&self, name: &'static str, dtype: &'static str) -> Result<()> {
        let required = self.require(name, self.dtype == dtype, "a tensor has another dtype");
        required.map_err(|error| error.with("expected", dtype))
    }

    pub(crate) fn element(&self, name: &'static str) -> Result<Element> {
        let element = Element::from_dtype(DType::from_name(&self.dtype));
        element.map_err(|error| error.with("argument", name))
    }

    pub(crate) fn at<T>(&self, name: &'static str) -> Result<*mut T> {
        if !self.on_host {
            return Err(self.wrong(name, "sparse retrieval on a CPU reads tensors of the host"));
        }
        let base = with_exposed_provenance_mut::<T>(self.address);
        if self.address == 0 && !self.shape.contains(&0) || !base.is_aligned() {
            return Err(self.wrong(name, "the address of a tensor is null or not aligned"));
        }
        Ok(base)
    }

    pub(crate) fn numbers(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its elements, without gaps.
    ///
    /// # Safety
    /// They can be read and are not written for `'a`, and the dtype is that of `T`.
    pub(crate) unsafe fn slice<'a, T>(&self, name: &'static str) -> Result<&'a [T]> {
        self.packed(name, 0)?;
        // SAFETY: aligned, without gaps; the caller vouches for the rest.
        Ok(unsafe { few(self.at(name)?, self.numbers()) })
    }

    /// Its elements, to be written.
    ///
    /// # Safety
    /// They can be written, nothing else reads or writes them for `'a`, and the dtype is
    /// that of `T`.
    pub(crate) unsafe fn slice_mut<'a, T>(&self, name: &'static str) -> Result<&'a mut [T]> {
        self.packed(name, 0)?;
        let base = self.at::<T>(name)?;
        if self.numbers() == 0 {
            return Ok(&mut []);
        }
        // SAFETY: as above.
        Ok(unsafe { std::slice::from_raw_parts_mut(base, self.numbers()) })
    }

    /// Integers; a matrix may have gaps between its rows. With them, their row stride.
    ///
    /// # Safety
    /// They can be read and are not written for `'a`.
    pub(crate) unsafe fn ints<'a>(&self, name: &'static str) -> Result<(Ints<'a>, usize)> {
        let (count, stride) = match (self.shape.as_slice(), self.strides.as_slice()) {
            ([len], [_]) => (*len, *len),
            ([0, columns], [_, _]) => (0, *columns),
            ([rows, columns], [stride, _]) if *rows == 1 || *stride >= *columns => {
                ((rows - 1) * stride + columns, *stride.max(columns))
            }
            _ => return Err(self.wrong(name, "integers are a vector or a matrix here")),
        };
        self.packed(name, self.shape.len() - 1)?;
        let ints = match self.dtype.as_str() {
            // SAFETY: as the caller of this function vouches; null only if there are none.
            "torch.int32" => Ints::I32(unsafe { few(self.at(name)?, count) }),
            // SAFETY: as above.
            "torch.int64" => Ints::I64(unsafe { few(self.at(name)?, count) }),
            _ => {
                return Err(self
                    .wrong(name, "a tensor has another dtype")
                    .with("expected", "int32 or int64"));
            }
        };
        Ok((ints, stride))
    }

    /// Vectors `[token, head, dim]`.
    ///
    /// # Safety
    /// They can be read and are not written for `'a`.
    pub(crate) unsafe fn vectors<'a>(&self, name: &'static str) -> Result<Vectors<'a>> {
        let shape = self.sizes(name)?;
        self.packed(name, 2)?;
        let strides = [self.strides[0], self.strides[1]];
        // SAFETY: as the caller of this function vouches.
        Ok(unsafe { Vectors::from_raw(self.at(name)?, self.element(name)?, shape, strides) })
    }

    /// The data of each block, `[block, ...]`; the dimensions from `first` on have no gaps, and
    /// `span` elements of each are read.
    ///
    /// # Safety
    /// They can be read for `'a`, and those of the call's blocks are not written.
    pub(crate) unsafe fn blocks<'a>(
        &self,
        name: &'static str,
        size: usize,
        first: usize,
        span: usize,
    ) -> Result<Blocks<'a>> {
        self.packed(name, first)?;
        let count = self.shape.first().copied().unwrap_or(0);
        let stride = self.strides.first().copied().unwrap_or(0);
        let base = self.at::<u8>(name)?;
        // SAFETY: as the caller of this function vouches.
        Ok(unsafe { Blocks::from_raw(base, count, stride * size, span * size) })
    }
}

/// # Safety
/// `count` items can be read at `base` for `'a`, which may be null if there are none.
unsafe fn few<'a, T>(base: *mut T, count: usize) -> &'a [T] {
    match count {
        0 => &[],
        // SAFETY: as the caller vouches.
        _ => unsafe { std::slice::from_raw_parts(base, count) },
    }
}
