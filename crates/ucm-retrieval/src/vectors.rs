//! Keys and queries in a model's layout, and the mean of the queries that share a KV head.
#![allow(unsafe_code, reason = "vectors of a model are read by address")]

use std::marker::PhantomData;

use ucm_core::{Error, Result};

use crate::element::{Bf16, Element, F16, Number};

/// Vectors `[token, head, dim]`, the last dimension without gaps.
#[derive(Debug, Clone, Copy)]
pub struct Vectors<'a> {
    base: *const u8,
    element: Element,
    tokens: usize,
    heads: usize,
    dim: usize,
    token_stride: usize,
    head_stride: usize,
    held: PhantomData<&'a [u8]>,
}

// SAFETY: it is a shared borrow of the vectors.
unsafe impl Send for Vectors<'_> {}
// SAFETY: as above; nothing is written through it.
unsafe impl Sync for Vectors<'_> {}

impl<'a> Vectors<'a> {
    /// Vectors without gaps in `bytes`; `shape` is tokens, heads, dim.
    ///
    /// # Errors
    ///
    /// `InvalidInput` if `bytes` has another length.
    pub fn new(bytes: &'a [u8], element: Element, shape: [usize; 3]) -> Result<Self> {
        let [_, heads, dim] = shape;
        let size = shape
            .iter()
            .try_fold(element.size(), |size, &part| size.checked_mul(part));
        if size != Some(bytes.len()) {
            let error = Error::invalid("there are other bytes than the vectors need")
                .with("bytes", bytes.len());
            return Err(error.with("shape", format!("{shape:?}")));
        }
        // SAFETY: all of it lies in `bytes`.
        Ok(unsafe { Self::from_raw(bytes.as_ptr(), element, shape, [heads * dim, dim]) })
    }

    /// Vectors at an address; `strides` are the elements from one token, and from one head, to the
    /// next.
    ///
    /// # Safety
    ///
    /// For `'a` all of their elements can be read and are not written.
    pub unsafe fn from_raw(
        base: *const u8,
        element: Element,
        shape: [usize; 3],
        strides: [usize; 2],
    ) -> Self {
        let ([tokens, heads, dim], [token_stride, head_stride]) = (shape, strides);
        Self {
            base,
            element,
            tokens,
            heads,
            dim,
            token_stride,
            head_stride,
            held: PhantomData,
        }
    }

    /// How many tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Heads of a token.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Length of a vector.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// The elements of a vector as singles.
    ///
    /// # Safety
    ///
    /// Token and head are among the vectors, and `to` has their length.
    pub(crate) unsafe fn read(&self, token: usize, head: usize, to: &mut [f32]) {
        let at = token * self.token_stride + head * self.head_stride;
        // SAFETY: as the caller vouches.
        unsafe {
            match self.element {
                Element::Bf16 => copy(self.base.cast::<Bf16>().add(at), to),
                Element::F16 => copy(self.base.cast::<F16>().add(at), to),
                Element::F32 => copy(self.base.cast::<f32>().add(at), to),
                Element::I8 => copy(self.base.cast::<i8>().add(at), to),
            }
        }
    }
}

/// # Safety
///
/// `from` has as many elements as `to`.
unsafe fn copy<N: Number>(from: *const N, to: &mut [f32]) {
    for (at, to) in to.iter_mut().enumerate() {
        // SAFETY: as the caller vouches.
        *to = unsafe { from.add(at).read_unaligned() }.to_f32();
    }
}

/// The mean of the query heads that share one of `heads` KV heads: `[row, heads * group, dim]`
/// becomes `[row, heads, dim]`.
///
/// ```
/// use ucm_retrieval::{Element, Vectors, group_mean};
///
/// let queries: Vec<u8> = [1.0f32, 2.0, 3.0, 6.0].iter().flat_map(|x| x.to_ne_bytes()).collect();
/// let queries = Vectors::new(&queries, Element::F32, [1, 2, 2]).unwrap();
/// assert_eq!(group_mean(&queries, 1).unwrap(), [2.0, 4.0]);
/// ```
///
/// # Errors
///
/// `InvalidInput` if the query heads cannot be divided among `heads`.
pub fn group_mean(queries: &Vectors<'_>, heads: usize) -> Result<Vec<f32>> {
    if heads == 0 || queries.heads == 0 || !queries.heads.is_multiple_of(heads) {
        let error =
            Error::invalid("every KV head has the same number of query heads, at least one");
        return Err(error
            .with("query_heads", queries.heads)
            .with("kv_heads", heads));
    }
    let (group, dim) = (queries.heads / heads, queries.dim);
    let mut means = vec![0.0; queries.tokens * heads * dim];
    let mut of_head = vec![0.0; dim];
    for (place, mean) in means.chunks_exact_mut(dim.max(1)).enumerate() {
        for member in 0..group {
            // SAFETY: each token has that many heads.
            unsafe { queries.read(place / heads, place % heads * group + member, &mut of_head) };
            for (mean, value) in mean.iter_mut().zip(&of_head) {
                *mean += value;
            }
        }
        if group > 1 {
            mean.iter_mut().for_each(|mean| *mean /= group as f32);
        }
    }
    Ok(means)
}
