//! Distances by the rule of ReRoPE, for pages with unrotated keys.
//!
//! ```text
//! logit(i, j) = scale · s_i · q_i·R(min(i - j, window))·k_j,   s_i = max(1, ln(i + 1) · log_unit)
//! ```
//!
//! Keys behind the window are multiplied as they are with the query rotated by the window. Of the
//! others, that of slot `o` of a block with first token `b` is rotated by `o` and the query by `i -
//! b`: a table of the slots of one block serves every block, and stays in cache.

use ucm_core::{Error, Result};

/// The rule of a call.
#[derive(Debug, Clone, Copy)]
pub struct Rerope<'a> {
    table: &'a [f32],
    dim: usize,
    window: usize,
    log_unit: f32,
}

impl<'a> Rerope<'a> {
    /// `table` has `[places, dim]`: the cosines of each place, then the sines; channel `c` turns
    /// with channel `c + dim / 2`. `log_unit` is `1 / ln(training length)`, or 0 without log scale.
    ///
    /// # Errors
    ///
    /// `InvalidInput` for an odd head size, a table that is not a whole number of places, or no
    /// window.
    pub fn new(table: &'a [f32], dim: usize, window: usize, log_unit: f32) -> Result<Self> {
        let whole = dim > 0 && dim.is_multiple_of(2) && table.len().is_multiple_of(dim);
        if !whole || table.is_empty() || window == 0 {
            let error = Error::invalid("a rotation has whole places of an even size, and a window");
            return Err(error.with("numbers", table.len()).with("dim", dim));
        }
        Ok(Self {
            table,
            dim,
            window,
            log_unit,
        })
    }
}

/// The rule for pages with blocks of one size.
#[derive(Debug)]
pub(super) struct Turns<'a> {
    rule: &'a Rerope<'a>,
    size: usize,
    /// Cosines, sines and negative sines of the slots of a block, each `[dim / 2, size]`.
    keys: Vec<f32>,
}

impl<'a> Turns<'a> {
    /// The rule for rows of at most `longest` tokens.
    ///
    /// # Errors
    ///
    /// `InvalidInput` if the table has too few places or another head size.
    pub(super) fn new(
        rule: &'a Rerope<'a>,
        dim: usize,
        size: usize,
        longest: usize,
    ) -> Result<Self> {
        let places = rule.table.len() / rule.dim;
        if rule.dim != dim || places < longest.min(rule.window.saturating_add(size)) {
            let error = Error::invalid("a rotation has too few places, or another head size");
            return Err(error.with("places", places).with("longest", longest));
        }
        let half = dim / 2;
        let mut keys = vec![0.0; 3 * half * size];
        for (slot, row) in rule.table.chunks_exact(dim).take(size).enumerate() {
            for channel in 0..half {
                keys[channel * size + slot] = row[channel];
                keys[(half + channel) * size + slot] = row[half + channel];
                keys[(2 * half + channel) * size + slot] = -row[half + channel];
            }
        }
        Ok(Self { rule, size, keys })
    }

    /// `s_i` of the last token of a row.
    pub(super) fn scale(&self, tokens: usize) -> f32 {
        ((tokens as f32).ln() * self.rule.log_unit).max(1.0)
    }

    /// The tokens of a block that are behind the window of the last token of a row.
    pub(super) fn far(&self, tokens: usize, block: usize) -> usize {
        let far = tokens.saturating_sub(self.rule.window);
        far.saturating_sub(block * self.size).min(self.size)
    }

    /// A query rotated by a distance, with the amplitude of a query.
    pub(super) fn near(&self, query: &[f32], distance: usize, to: &mut [f32]) {
        self.turn(query, distance, 1.0, to);
    }

    /// A query for a key as it is, at a distance that the window ends.
    pub(super) fn whole(&self, query: &[f32], distance: usize, to: &mut [f32]) {
        self.turn(
            query,
            distance.min(self.rule.window),
            self.rule.table[0],
            to,
        );
    }

    /// The query for keys behind the window; unset if no row of the call has such keys.
    pub(super) fn behind(&self, query: &[f32], to: &mut [f32]) {
        if self.rule.window < self.rule.table.len() / self.rule.dim {
            self.whole(query, self.rule.window, to);
        }
    }

    fn turn(&self, query: &[f32], distance: usize, amplitude: f32, to: &mut [f32]) {
        let row = &self.rule.table[distance * self.rule.dim..][..self.rule.dim];
        let half = self.rule.dim / 2;
        let ((low, high), (cos, sin)) = (query.split_at(half), row.split_at(half));
        let (to_low, to_high) = to.split_at_mut(half);
        for at in 0..half {
            to_low[at] = (low[at] * cos[at] - high[at] * sin[at]) * amplitude;
            to_high[at] = (high[at] * cos[at] + low[at] * sin[at]) * amplitude;
        }
    }

    /// Cosines, sines and negative sines of the slots from `slot` on; the next channel is a block
    /// size behind.
    pub(super) fn slots(&self, slot: usize) -> [*const f32; 3] {
        let third = self.keys.len() / 3;
        std::array::from_fn(|part| self.keys[part * third + slot..].as_ptr())
    }
}
