//! Operands of instructions: types, registers, special registers, constants, and their slots.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use super::code::{SPECIAL, Slot, Type};

/// The type of that name ("u32", "pred"), if its first letter is one of `kinds` and its width is in
/// `widths`.
pub(super) fn ty(name: &str, kinds: &str, widths: RangeInclusive<u32>) -> Result<Type, String> {
    let (kind, bits) = match name {
        "pred" => ("p", "1"),
        name => name.split_at_checked(1).unwrap_or_default(),
    };
    match bits.parse() {
        Ok(bits @ (1 | 8 | 16 | 32 | 64))
            if kinds.contains(kind)
                && (if kind == "p" {
                    bits == 1
                } else {
                    widths.contains(&bits)
                }) =>
        {
            Ok(Type {
                bits,
                signed: kind == "s",
            })
        }
        _ => Err(format!("no such type here: {name}")),
    }
}

/// Widths of registers permitted for a type: its own, or, for a value that is cut or extended, any
/// larger one too.
pub(super) fn exactly(ty: Type) -> RangeInclusive<u32> {
    ty.bits..=ty.bits
}

/// See [`exactly`].
pub(super) fn at_least(ty: Type) -> RangeInclusive<u32> {
    ty.bits..=64
}

/// Registers of one declaration.
struct Registers {
    bits: u32,
    first: usize,
    count: usize,
}

/// The slots of one kernel.
#[derive(Default)]
pub(super) struct Operands {
    declared: HashMap<String, Registers>,
    pub(super) registers: usize,
    pub(super) constants: Vec<u64>,
}

impl Operands {
    /// Takes a declaration: `.b32 %r<12>` declares `%r0` to `%r11`. No constant may have a slot
    /// yet.
    pub(super) fn declare(&mut self, declaration: &str) -> Result<(), String> {
        let parsed = || {
            let (name, rest) = declaration
                .strip_prefix('.')?
                .split_once(char::is_whitespace)?;
            let (prefix, count) = rest.trim().strip_suffix('>')?.split_once('<')?;
            Some((name, prefix, count.parse::<u16>().ok()?))
        };
        let (name, prefix, count) = parsed().ok_or("not registers")?;
        let registers = Registers {
            bits: ty(name, "busp", 16..=64)?.bits,
            first: SPECIAL.len() + self.registers,
            count: count.into(),
        };
        self.registers += registers.count;
        match self.declared.insert(prefix.to_owned(), registers) {
            None => Ok(()),
            Some(_) => Err("these registers are declared already".to_owned()),
        }
    }

    /// The slot of a declared register.
    pub(super) fn register(&self, name: &str, widths: RangeInclusive<u32>) -> Result<Slot, String> {
        let digits = name.trim_start_matches(|c: char| !c.is_ascii_digit());
        let found = self.declared.get(&name[..name.len() - digits.len()]);
        match (found, digits.parse::<usize>()) {
            (Some(registers), Ok(number)) if number < registers.count => {
                width(name, registers.bits, widths)?;
                slot(registers.first + number)
            }
            _ => Err(format!("no such register: {name}")),
        }
    }

    /// The slot of a read operand: a register, a special register or a constant.
    pub(super) fn value(
        &mut self,
        text: &str,
        widths: RangeInclusive<u32>,
    ) -> Result<Slot, String> {
        if let Some(special) = SPECIAL.iter().position(|name| *name == text) {
            width(text, 32, widths)?;
            slot(special)
        } else if text.starts_with('%') {
            self.register(text, widths)
        } else {
            self.constant(integer(text)?)
        }
    }

    /// The slot of a constant.
    pub(super) fn constant(&mut self, value: u64) -> Result<Slot, String> {
        let at = self.constants.iter().position(|known| *known == value);
        let at = at.unwrap_or_else(|| {
            self.constants.push(value);
            self.constants.len() - 1
        });
        slot(SPECIAL.len() + self.registers + at)
    }
}

fn slot(at: usize) -> Result<Slot, String> {
    Slot::try_from(at).map_err(|_| "too many registers and constants".to_owned())
}

fn width(name: &str, bits: u32, widths: RangeInclusive<u32>) -> Result<(), String> {
    if widths.contains(&bits) {
        Ok(())
    } else {
        Err(format!("{name} is {bits} bits wide"))
    }
}

/// An integer constant, in the low bits: decimal or hexadecimal, perhaps negative.
pub(super) fn integer(text: &str) -> Result<u64, String> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text),
    };
    let digits = digits.strip_suffix('U').unwrap_or(digits);
    let number = match digits.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        // PTX would read this as octal.
        None if digits.len() > 1 && digits.starts_with('0') => {
            return Err(format!("not understood: {text}"));
        }
        None => digits.parse(),
    };
    let number = number.map_err(|_| format!("not understood: {text}"))?;
    Ok(if negative {
        number.wrapping_neg()
    } else {
        number
    })
}
