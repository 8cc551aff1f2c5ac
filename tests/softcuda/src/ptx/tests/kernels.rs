//! The committed kernels against plain copies.

use proptest::collection::vec;
use proptest::prelude::*;

use super::super::{Fault, Kernel, Module};
use super::Ram;

/// Where the memory of these tests begins.
const BASE: u64 = 0x7f00_0000_0000;
/// Threads of a block (kernels/copy.cu, THREADS).
const BLOCK: [u32; 3] = [256, 1, 1];

fn module() -> Module {
    Module::parse(include_str!("../../../../../kernels/copy.ptx")).unwrap()
}

/// A planned descriptor: the offsets of its two ends from aligned addresses, and its length.
#[derive(Clone, Debug)]
struct Wish {
    from: usize,
    to: usize,
    len: usize,
}

fn shift() -> impl Strategy<Value = usize> {
    prop_oneof![3 => Just(0), 2 => Just(8), 2 => Just(4), 1 => 1usize..16]
}

fn wish() -> impl Strategy<Value = Wish> {
    let len = prop_oneof![
        1 => Just(0),
        4 => 1usize..40,
        4 => 1usize..5_000,
        2 => (1usize..3_000).prop_map(|words| 16 * words),
        1 => 0usize..=200_000,
    ];
    (shift(), shift(), len).prop_map(|(from, to, len)| Wish { from, to, len })
}

fn wishes() -> impl Strategy<Value = Vec<Wish>> {
    vec(wish(), 0..=64)
}

fn grid() -> impl Strategy<Value = [u32; 3]> {
    (prop_oneof![1u32..6, Just(64)], 1u32..5).prop_map(|(x, y)| [x, y, 1])
}

/// Bytes without nearby repetitions.
fn noise(len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

/// Places in one memory, allocated in order, with unused bytes between them.
struct Layout {
    end: usize,
}

impl Layout {
    /// The next place, at this offset from an aligned address.
    fn place(&mut self, shift: usize, len: usize) -> usize {
        let at = self.end.next_multiple_of(16) + shift;
        self.end = at + len;
        at
    }
}

/// Runs a kernel over `memory` with the descriptors at `table`; returns the memory afterwards.
fn launch(
    kernel: &Kernel,
    grid: [u32; 3],
    arguments: &[u64],
    memory: Vec<u8>,
) -> Result<Vec<u8>, Fault> {
    assert_eq!(kernel.params(), vec![8; arguments.len()]);
    let params: Vec<u8> = arguments
        .iter()
        .flat_map(|argument| argument.to_le_bytes())
        .collect();
    let ram = Ram::new(BASE, memory);
    kernel.run(grid, BLOCK, &params, &ram)?;
    Ok(ram.bytes.into_inner().unwrap())
}

/// Copies within one memory by descriptors (from, to, len), once by a kernel and once plainly.
/// `fields` makes the words of a descriptor from the two addresses; `rest` are the arguments after
/// the count.
fn same(
    name: &str,
    grid: [u32; 3],
    copies: &[(usize, usize, usize)],
    end: usize,
    fields: impl Fn(u64, u64) -> [u64; 2],
    rest: &[u64],
) {
    let table = end.next_multiple_of(16);
    let mut memory = noise(table);
    for (from, to, len) in copies {
        let [first, second] = fields(BASE + *from as u64, BASE + *to as u64);
        memory.extend([first, second, *len as u64].map(u64::to_le_bytes).concat());
    }
    let mut expected = memory.clone();
    for (from, to, len) in copies {
        expected.copy_within(*from..from + len, *to);
    }
    let arguments = [&[BASE + table as u64, copies.len() as u64], rest].concat();
    let module = module();
    let given = launch(module.kernel(name).unwrap(), grid, &arguments, memory).unwrap();
    let differs = given
        .iter()
        .zip(&expected)
        .position(|(given, expected)| given != expected);
    assert_eq!(differs, None, "{name}: the first wrong byte");
}

/// The layout: the places of the pieces, then a record with their parts.
fn pieces(wishes: &[Wish]) -> (Vec<(usize, usize, usize)>, usize, usize) {
    let mut layout = Layout { end: 5 };
    let places: Vec<usize> = wishes
        .iter()
        .map(|wish| layout.place(wish.from, wish.len))
        .collect();
    // The base of a record need not be aligned, but mostly is.
    let base = layout.place(wishes.first().map_or(0, |wish| wish.to), 0);
    let parts = wishes.iter().map(|wish| layout.place(wish.to, wish.len));
    let copies = parts
        .zip(&places)
        .zip(wishes)
        .map(|((part, place), wish)| (*place, part, wish.len));
    let copies = copies.collect();
    (copies, base, layout.end + 5)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn batch_copies_pairs(wishes in wishes(), grid in grid()) {
        let mut layout = Layout { end: 5 };
        let copies: Vec<_> = wishes
            .iter()
            .map(|wish| (layout.place(wish.from, wish.len), layout.place(wish.to, wish.len), wish.len))
            .collect();
        same("ucm_batch", grid, &copies, layout.end + 5, |from, to| [from, to], &[]);
    }

    #[test]
    fn gather_brings_pieces_to_their_places(wishes in wishes(), grid in grid()) {
        let (copies, base, end) = pieces(&wishes);
        let base = BASE + base as u64;
        same("ucm_gather", grid, &copies, end, |from, to| [from, to - base], &[base]);
    }

    #[test]
    fn scatter_brings_parts_to_their_pieces(wishes in wishes(), grid in grid()) {
        let (copies, base, end) = pieces(&wishes);
        let base = BASE + base as u64;
        let back: Vec<_> = copies.iter().map(|(place, part, len)| (*part, *place, *len)).collect();
        same("ucm_scatter", grid, &back, end, |from, to| [to, from - base], &[base]);
    }
}

#[test]
fn the_module_has_the_three_kernels() {
    let module = module();
    for (name, params) in [("ucm_batch", 2), ("ucm_gather", 3), ("ucm_scatter", 3)] {
        let kernel = module.kernel(name).unwrap();
        assert_eq!(
            (kernel.params(), kernel.max_threads()),
            (&vec![8; params][..], Some(BLOCK[0]))
        );
    }
}

#[test]
fn nothing_to_copy_touches_nothing() {
    let module = module();
    for name in ["ucm_batch", "ucm_gather", "ucm_scatter"] {
        let kernel = module.kernel(name).unwrap();
        let arguments = vec![0; kernel.params().len()];
        assert_eq!(
            launch(kernel, [7, 2, 1], &arguments, Vec::new()),
            Ok(Vec::new())
        );
    }
}

/// The outcome of one pair, whose addresses count from `BASE`, in memory of 1024 bytes that begins
/// with the pair.
fn one_pair(src: u64, dst: u64, len: u64) -> Result<Vec<u8>, Fault> {
    let mut memory = [BASE + src, BASE + dst, len].map(u64::to_le_bytes).concat();
    memory.extend(noise(1000));
    launch(
        module().kernel("ucm_batch").unwrap(),
        [2, 2, 1],
        &[BASE, 1],
        memory,
    )
}

#[test]
fn addresses_outside_of_memory_are_faults() {
    let fault = |at, len| {
        Err(Fault {
            address: BASE + at,
            len,
        })
    };
    assert!(one_pair(32, 512, 100).is_ok());
    assert_eq!(one_pair(1024, 512, 16), fault(1024, 16));
    assert_eq!(one_pair(32, 1024, 16), fault(1024, 16));
    assert_eq!(one_pair(1008, 512, 17), fault(1024, 1));
    assert_eq!(one_pair(1016, 512, 16), fault(1024, 8));
    assert_eq!(one_pair(1020, 512, 8), fault(1024, 4));
    assert_eq!(one_pair(513, 1023, 2), fault(1024, 1));
}

#[test]
fn descriptors_have_to_be_aligned_and_there() {
    let module = module();
    let kernel = module.kernel("ucm_batch").unwrap();
    let misplaced = launch(kernel, [1, 1, 1], &[BASE + 4, 1], noise(64)).unwrap_err();
    assert_eq!((misplaced.address - BASE) % 8, 4);
    let beyond = launch(kernel, [1, 1, 1], &[BASE, 2], vec![0; 24]).unwrap_err();
    assert!((24..48).contains(&(beyond.address - BASE)));
}
