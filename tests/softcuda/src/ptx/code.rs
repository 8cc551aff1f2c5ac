//! The parsed form of a kernel, and its execution.
//!
//! All values lie in one array of 64-bit slots: the special registers, then the registers of the
//! kernel, then its constants. An instruction reads the low bits of a slot that its type has and
//! writes all 64; bits above the width of a register are never read.

use super::{Fault, Memory};

/// Index into the slots.
pub(super) type Slot = u16;

/// The special registers, in the order of their slots.
pub(super) const SPECIAL: [&str; 12] = [
    "%tid.x",
    "%tid.y",
    "%tid.z",
    "%ctaid.x",
    "%ctaid.y",
    "%ctaid.z",
    "%ntid.x",
    "%ntid.y",
    "%ntid.z",
    "%nctaid.x",
    "%nctaid.y",
    "%nctaid.z",
];
const TID: usize = 0;
const CTAID: usize = 3;
const NTID: usize = 6;
const NCTAID: usize = 9;

/// Content of an unwritten register, on which no code may rely.
const UNDEFINED: u64 = 0xdead_beef_dead_beef;

/// Width and sign of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Type {
    pub(super) bits: u32,
    pub(super) signed: bool,
}

impl Type {
    /// The number that a slot holds for this type, extended by its sign to 64 bits.
    fn read(self, slot: u64) -> u64 {
        let unused = 64 - self.bits;
        if self.signed {
            ((slot << unused) as i64 >> unused) as u64
        } else {
            (slot << unused) >> unused
        }
    }

    /// Whether one number [read](Self::read) is below another.
    fn less(self, x: u64, y: u64) -> bool {
        if self.signed {
            (x as i64) < y as i64
        } else {
            x < y
        }
    }

    pub(super) fn bytes(self) -> usize {
        self.bits as usize / 8
    }
}

/// Operations of two operands. Others are made of these: `not a` is `a ^ -1`, `neg a` is `0 - a`,
/// `a > b` is `b < a`.
#[derive(Clone, Copy, Debug)]
pub(super) enum Binary {
    Add,
    Sub,
    /// The whole product; the reader takes its low half (`lo`) or all of it (`wide`).
    Mul,
    MulHigh,
    Min,
    Max,
    And,
    Or,
    Xor,
    ShiftLeft,
    ShiftRight,
    Equal,
    NotEqual,
    Less,
    LessEqual,
}

impl Binary {
    /// The result, of which the low bits count.
    #[inline]
    fn of(self, ty: Type, a: u64, b: u64) -> u64 {
        let (x, y) = (ty.read(a), ty.read(b));
        // Of shifts: a 32-bit number whatever the type.
        let amount = (b as u32).min(ty.bits);
        match self {
            Self::Add => x.wrapping_add(y),
            Self::Sub => x.wrapping_sub(y),
            Self::Mul => x.wrapping_mul(y),
            Self::MulHigh if ty.signed => {
                ((i128::from(x as i64) * i128::from(y as i64)) >> ty.bits) as u64
            }
            Self::MulHigh => ((u128::from(x) * u128::from(y)) >> ty.bits) as u64,
            Self::Min => {
                if ty.less(x, y) {
                    x
                } else {
                    y
                }
            }
            Self::Max => {
                if ty.less(x, y) {
                    y
                } else {
                    x
                }
            }
            Self::And => x & y,
            Self::Or => x | y,
            Self::Xor => x ^ y,
            Self::ShiftLeft => x.checked_shl(amount).unwrap_or(0),
            Self::ShiftRight if ty.signed => (x as i64 >> amount.min(63)) as u64,
            Self::ShiftRight => x.checked_shr(amount).unwrap_or(0),
            Self::Equal => u64::from(x == y),
            Self::NotEqual => u64::from(x != y),
            Self::Less => u64::from(ty.less(x, y)),
            Self::LessEqual => u64::from(!ty.less(y, x)),
        }
    }
}

/// Up to four registers of one access to memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    pub(super) ty: Type,
    pub(super) base: Slot,
    pub(super) offset: i32,
    pub(super) count: u8,
    pub(super) slots: [Slot; 4],
}

impl Access {
    /// Where it begins and its bytes, aligned as a device wants it.
    fn place(&self, slots: &[u64]) -> Result<(u64, usize), Fault> {
        let address = slots[usize::from(self.base)].wrapping_add_signed(self.offset.into());
        let len = self.ty.bytes() * usize::from(self.count);
        if address.is_multiple_of(len as u64) {
            Ok((address, len))
        } else {
            Err(Fault { address, len })
        }
    }

    fn load(&self, slots: &mut [u64], memory: &dyn Memory) -> Result<(), Fault> {
        let (address, len) = self.place(slots)?;
        let mut bytes = [0; 16];
        memory.load(address, &mut bytes[..len])?;
        let parts = bytes[..len].chunks_exact(self.ty.bytes());
        for (slot, part) in self.slots.iter().zip(parts) {
            slots[usize::from(*slot)] = number(self.ty, part);
        }
        Ok(())
    }

    fn store(&self, slots: &[u64], memory: &dyn Memory) -> Result<(), Fault> {
        let (address, len) = self.place(slots)?;
        let mut bytes = [0; 16];
        let parts = bytes[..len].chunks_exact_mut(self.ty.bytes());
        for (slot, part) in self.slots.iter().zip(parts) {
            part.copy_from_slice(&slots[usize::from(*slot)].to_le_bytes()[..part.len()]);
        }
        memory.store(address, &bytes[..len])
    }
}

/// The slot of a number in memory: extended by its sign to all 64 bits.
fn number(ty: Type, bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    ty.read(u64::from_le_bytes(word))
}

/// One operation.
#[derive(Clone, Copy, Debug)]
pub(super) enum Op {
    /// `dst = a`, extended by the sign of its type: every move and conversion. The second type is
    /// the target width.
    Convert {
        to: Type,
        from: Type,
        dst: Slot,
        a: Slot,
    },
    Binary {
        op: Binary,
        ty: Type,
        dst: Slot,
        a: Slot,
        b: Slot,
    },
    /// `dst = (a op b) + c`, where `op` multiplies.
    MulAdd {
        op: Binary,
        ty: Type,
        dst: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    /// `dst = p ? a : b`
    Select {
        dst: Slot,
        a: Slot,
        b: Slot,
        p: Slot,
    },
    /// From the parameter buffer.
    Param {
        ty: Type,
        dst: Slot,
        at: u16,
    },
    Load(Access),
    Store(Access),
    Branch(u32),
    Return,
}

/// An operation, and when it is executed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Instruction {
    /// A predicate and its required value.
    pub(super) guard: Option<(Slot, bool)>,
    pub(super) op: Op,
}

/// An entry point, ready to run.
#[derive(Debug)]
pub struct Kernel {
    pub(super) name: String,
    pub(super) params: Vec<usize>,
    pub(super) max_threads: Option<u32>,
    pub(super) registers: usize,
    pub(super) constants: Vec<u64>,
    pub(super) code: Vec<Instruction>,
}

impl Kernel {
    /// The name of the entry point.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Size in bytes of each parameter, in order.
    pub fn params(&self) -> &[usize] {
        &self.params
    }

    /// Most threads of a block, if the kernel says so. A driver refuses to launch more;
    /// [`run`](Self::run) does not check.
    pub fn max_threads(&self) -> Option<u32> {
        self.max_threads
    }

    /// Executes all threads of all blocks, one after the other, until one faults. Stores of earlier
    /// threads stay.
    ///
    /// `params` is the parameter buffer: each parameter at the next multiple of its size,
    /// little-endian.
    ///
    /// # Panics
    ///
    /// When `params` is shorter than the parameters.
    pub fn run(
        &self,
        grid: [u32; 3],
        block: [u32; 3],
        params: &[u8],
        memory: &dyn Memory,
    ) -> Result<(), Fault> {
        let registers = SPECIAL.len()..SPECIAL.len() + self.registers;
        let mut slots = vec![0; registers.end];
        slots.extend(&self.constants);
        set(&mut slots, NCTAID, grid);
        set(&mut slots, NTID, block);
        for ctaid in places(grid) {
            set(&mut slots, CTAID, ctaid);
            for tid in places(block) {
                set(&mut slots, TID, tid);
                slots[registers.clone()].fill(UNDEFINED);
                self.thread(&mut slots, params, memory)?;
            }
        }
        Ok(())
    }

    /// Executes one thread.
    fn thread(&self, slots: &mut [u64], params: &[u8], memory: &dyn Memory) -> Result<(), Fault> {
        let mut next = 0;
        loop {
            let Instruction { guard, op } = &self.code[next];
            next += 1;
            if guard.is_some_and(|(p, wanted)| (get(slots, p) & 1 != 0) != wanted) {
                continue;
            }
            match *op {
                Op::Convert { to, from, dst, a } => {
                    let value = from.read(get(slots, a));
                    slots[usize::from(dst)] = to.read(value);
                }
                Op::Binary { op, ty, dst, a, b } => {
                    slots[usize::from(dst)] = op.of(ty, get(slots, a), get(slots, b));
                }
                Op::MulAdd {
                    op,
                    ty,
                    dst,
                    a,
                    b,
                    c,
                } => {
                    let product = op.of(ty, get(slots, a), get(slots, b));
                    slots[usize::from(dst)] = product.wrapping_add(get(slots, c));
                }
                Op::Select { dst, a, b, p } => {
                    let chosen = if get(slots, p) & 1 != 0 { a } else { b };
                    slots[usize::from(dst)] = get(slots, chosen);
                }
                Op::Param { ty, dst, at } => {
                    let at = usize::from(at);
                    slots[usize::from(dst)] = number(ty, &params[at..at + ty.bytes()]);
                }
                Op::Load(access) => access.load(slots, memory)?,
                Op::Store(access) => access.store(slots, memory)?,
                Op::Branch(to) => next = to as usize,
                Op::Return => return Ok(()),
            }
        }
    }
}

fn get(slots: &[u64], slot: Slot) -> u64 {
    slots[usize::from(slot)]
}

/// Writes the three special registers from `first` on.
fn set(slots: &mut [u64], first: usize, values: [u32; 3]) {
    for (slot, value) in slots[first..first + 3].iter_mut().zip(values) {
        *slot = value.into();
    }
}

/// Every place in a box of three dimensions, x first.
fn places(size: [u32; 3]) -> impl Iterator<Item = [u32; 3]> {
    let [width, height, depth] = size;
    (0..depth).flat_map(move |z| (0..height).flat_map(move |y| (0..width).map(move |x| [x, y, z])))
}
