//! Parses the text of a PTX file to kernels. A line is a directive, a label or an instruction, as
//! compilers write it.

use std::collections::HashMap;

use super::code::{Access, Binary, Instruction, Kernel, Op, Type};
use super::operands::{Operands, at_least, exactly, integer, ty};

/// A line without its comment.
#[derive(Clone, Copy)]
struct Line<'a> {
    number: usize,
    text: &'a str,
}

impl Line<'_> {
    fn error(&self, why: impl std::fmt::Display) -> String {
        format!("line {}: {}: {why}", self.number, self.text)
    }
}

/// The lines that are not empty.
struct Lines<'a, I: Iterator<Item = Line<'a>>>(I);

impl<'a, I: Iterator<Item = Line<'a>>> Lines<'a, I> {
    fn next(&mut self) -> Result<Line<'a>, String> {
        self.0
            .next()
            .ok_or_else(|| "the file ends too early".to_owned())
    }

    /// Reads the next line, which must be this one.
    fn expect(&mut self, text: &str) -> Result<(), String> {
        let line = self.next()?;
        if line.text.split_whitespace().eq(text.split_whitespace()) {
            Ok(())
        } else {
            Err(line.error(format!("expected {text}")))
        }
    }
}

/// The kernels of a file.
pub(super) fn kernels(text: &str) -> Result<Vec<Kernel>, String> {
    let numbered = (1..).zip(
        text.lines()
            .map(|line| line.split("//").next().unwrap_or_default().trim()),
    );
    let mut lines = Lines(
        numbered
            .map(|(number, text)| Line { number, text })
            .filter(|line| !line.text.is_empty()),
    );
    lines.expect(".version 7.0")?;
    lines.expect(".target sm_70")?;
    lines.expect(".address_size 64")?;
    let mut kernels = Vec::new();
    while let Some(line) = lines.0.next() {
        let name = line
            .text
            .strip_prefix(".visible .entry ")
            .and_then(|rest| rest.strip_suffix('('));
        let name = name.ok_or_else(|| line.error("no such directive"))?;
        kernels.push(kernel(name.trim(), &mut lines)?);
    }
    Ok(kernels)
}

/// A parameter: its type, and where it lies in the parameter buffer.
struct Param<'a> {
    name: &'a str,
    ty: Type,
    at: u16,
}

/// What follows `.visible .entry name(`.
fn kernel<'a, I: Iterator<Item = Line<'a>>>(
    name: &str,
    lines: &mut Lines<'a, I>,
) -> Result<Kernel, String> {
    let params = parameters(lines)?;
    let mut max_threads = None;
    loop {
        let line = lines.next()?;
        match line.text.strip_prefix(".maxntid ") {
            Some(sizes) => {
                let sizes = sizes.split(',').map(|size| size.trim().parse::<u32>());
                let product = sizes
                    .product::<Result<u32, _>>()
                    .map_err(|e| line.error(e))?;
                max_threads = Some(product);
            }
            None if line.text == "{" => break,
            None => return Err(line.error("no such directive")),
        }
    }
    // Labels and registers first: both are named before they appear.
    let mut body = Body {
        params,
        operands: Operands::default(),
        labels: HashMap::new(),
    };
    let mut instructions = Vec::new();
    loop {
        let line = lines.next()?;
        if line.text == "}" {
            break;
        } else if let Some(declared) = line.text.strip_prefix(".reg ") {
            let declared = declared.strip_suffix(';').unwrap_or(declared).trim();
            body.operands
                .declare(declared)
                .map_err(|why| line.error(why))?;
        } else if let Some(label) = line.text.strip_suffix(':') {
            if body
                .labels
                .insert(label, instructions.len() as u32)
                .is_some()
            {
                return Err(line.error("this label stands elsewhere too"));
            }
        } else {
            instructions.push(line);
        }
    }
    let mut code = Vec::new();
    for line in instructions {
        code.push(body.instruction(line.text).map_err(|why| line.error(why))?);
    }
    // A body without a final return gets one, and labels may be there.
    code.push(Instruction {
        guard: None,
        op: Op::Return,
    });
    Ok(Kernel {
        name: name.to_owned(),
        params: body.params.iter().map(|param| param.ty.bytes()).collect(),
        max_threads,
        registers: body.operands.registers,
        constants: body.operands.constants,
        code,
    })
}

/// Parameters up to the closing parenthesis.
fn parameters<'a, I: Iterator<Item = Line<'a>>>(
    lines: &mut Lines<'a, I>,
) -> Result<Vec<Param<'a>>, String> {
    let mut params = Vec::new();
    let mut end = 0;
    loop {
        let line = lines.next()?;
        if line.text == ")" {
            return Ok(params);
        }
        let words: Vec<&str> = line.text.trim_end_matches(',').split_whitespace().collect();
        let [".param", kind, name] = words[..] else {
            return Err(line.error("not a parameter"));
        };
        let ty = ty(kind.trim_start_matches('.'), "bus", 8..=64).map_err(|why| line.error(why))?;
        let at = u16::next_multiple_of(end, ty.bytes() as u16);
        end = at + ty.bytes() as u16;
        params.push(Param { name, ty, at });
    }
}

/// Symbols of a kernel's instructions.
struct Body<'a> {
    params: Vec<Param<'a>>,
    operands: Operands,
    labels: HashMap<&'a str, u32>,
}

impl Body<'_> {
    fn instruction(&mut self, text: &str) -> Result<Instruction, String> {
        let text = text
            .strip_suffix(';')
            .ok_or("no instruction ends like this")?;
        let (guard, text) = match text.strip_prefix('@') {
            None => (None, text),
            Some(guarded) => {
                let (p, rest) = guarded
                    .split_once(char::is_whitespace)
                    .ok_or("a guard of nothing")?;
                let wanted = !p.starts_with('!');
                let p = self.operands.register(p.trim_start_matches('!'), 1..=1)?;
                (Some((p, wanted)), rest.trim_start())
            }
        };
        let (opcode, operands) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let parts: Vec<&str> = opcode.split('.').collect();
        let op = self.op(&parts, &split(operands))?;
        Ok(Instruction { guard, op })
    }

    /// The opcodes. [`Op`] and [`Binary`] document their parts.
    fn op(&mut self, opcode: &[&str], operands: &[&str]) -> Result<Op, String> {
        match *opcode {
            ["ret" | "exit"] => {
                let [] = fixed(operands)?;
                Ok(Op::Return)
            }
            ["bra"] | ["bra", "uni"] => {
                let [label] = fixed(operands)?;
                let to = self
                    .labels
                    .get(label)
                    .ok_or_else(|| format!("no such label: {label}"))?;
                Ok(Op::Branch(*to))
            }
            ["mov", kind] => self.convert(ty(kind, "busp", 16..=64)?, operands),
            ["cvta", "global", "u64"] | ["cvta", "to", "global", "u64"] => {
                self.convert(ty("u64", "u", 64..=64)?, operands)
            }
            ["cvt", to, from] => {
                let (to, from) = (ty(to, "us", 8..=64)?, ty(from, "us", 8..=64)?);
                let [dst, a] = fixed(operands)?;
                Ok(Op::Convert {
                    to,
                    from,
                    dst: self.operands.register(dst, at_least(to))?,
                    a: self.operands.value(a, at_least(from))?,
                })
            }
            ["add", kind] => self.arithmetic(Binary::Add, kind, operands),
            ["sub", kind] => self.arithmetic(Binary::Sub, kind, operands),
            ["min", kind] => self.arithmetic(Binary::Min, kind, operands),
            ["max", kind] => self.arithmetic(Binary::Max, kind, operands),
            ["and", kind] => self.binary(Binary::And, ty(kind, "bp", 16..=64)?, operands),
            ["or", kind] => self.binary(Binary::Or, ty(kind, "bp", 16..=64)?, operands),
            ["xor", kind] => self.binary(Binary::Xor, ty(kind, "bp", 16..=64)?, operands),
            ["not", kind] => {
                let [dst, a] = fixed(operands)?;
                self.binary(Binary::Xor, ty(kind, "bp", 16..=64)?, &[dst, a, "-1"])
            }
            ["neg", kind] => {
                let [dst, a] = fixed(operands)?;
                self.binary(Binary::Sub, ty(kind, "s", 16..=64)?, &[dst, "0", a])
            }
            ["mul", part, kind] => {
                let (op, ty, wide) = product(part, kind)?;
                let [dst, a, b] = fixed(operands)?;
                Ok(Op::Binary {
                    op,
                    ty,
                    dst: self.operands.register(dst, exactly(wide))?,
                    a: self.operands.value(a, exactly(ty))?,
                    b: self.operands.value(b, exactly(ty))?,
                })
            }
            ["mad", part, kind] => {
                let (op, ty, wide) = product(part, kind)?;
                let [dst, a, b, c] = fixed(operands)?;
                Ok(Op::MulAdd {
                    op,
                    ty,
                    dst: self.operands.register(dst, exactly(wide))?,
                    a: self.operands.value(a, exactly(ty))?,
                    b: self.operands.value(b, exactly(ty))?,
                    c: self.operands.value(c, exactly(wide))?,
                })
            }
            ["shl", kind] => self.shift(Binary::ShiftLeft, ty(kind, "b", 16..=64)?, operands),
            ["shr", kind] => self.shift(Binary::ShiftRight, ty(kind, "bus", 16..=64)?, operands),
            ["setp", comparison, kind] => self.compare(comparison, kind, operands),
            ["selp", kind] => {
                let ty = ty(kind, "bus", 16..=64)?;
                let [dst, a, b, p] = fixed(operands)?;
                Ok(Op::Select {
                    dst: self.operands.register(dst, exactly(ty))?,
                    a: self.operands.value(a, exactly(ty))?,
                    b: self.operands.value(b, exactly(ty))?,
                    p: self.operands.register(p, 1..=1)?,
                })
            }
            ["ld", "param", kind] => self.param(ty(kind, "bus", 8..=64)?, operands),
            ["ld", ref how @ .., kind] => {
                let [registers, address] = fixed(operands)?;
                let access =
                    self.access(how, &["ca", "cg", "cs", "lu", "cv", "nc"], kind, address)?;
                let fits = at_least(access.ty);
                let filled = filled(access, registers, |name| {
                    self.operands.register(name, fits.clone())
                })?;
                Ok(Op::Load(filled))
            }
            ["st", ref how @ .., kind] => {
                let [address, values] = fixed(operands)?;
                let access = self.access(how, &["wb", "cg", "cs", "wt"], kind, address)?;
                let fits = at_least(access.ty);
                let filled = filled(access, values, |name| {
                    self.operands.value(name, fits.clone())
                })?;
                Ok(Op::Store(filled))
            }
            _ => Err("no such instruction".to_owned()),
        }
    }

    /// `dst = a`, both of one type.
    fn convert(&mut self, ty: Type, operands: &[&str]) -> Result<Op, String> {
        let [dst, a] = fixed(operands)?;
        Ok(Op::Convert {
            to: ty,
            from: ty,
            dst: self.operands.register(dst, exactly(ty))?,
            a: self.operands.value(a, exactly(ty))?,
        })
    }

    fn arithmetic(&mut self, op: Binary, kind: &str, operands: &[&str]) -> Result<Op, String> {
        self.binary(op, ty(kind, "us", 16..=64)?, operands)
    }

    /// `dst = a op b`, all of one type.
    fn binary(&mut self, op: Binary, ty: Type, operands: &[&str]) -> Result<Op, String> {
        let [dst, a, b] = fixed(operands)?;
        Ok(Op::Binary {
            op,
            ty,
            dst: self.operands.register(dst, exactly(ty))?,
            a: self.operands.value(a, exactly(ty))?,
            b: self.operands.value(b, exactly(ty))?,
        })
    }

    /// `dst = a op b`, where the amount `b` is a 32-bit number.
    fn shift(&mut self, op: Binary, ty: Type, operands: &[&str]) -> Result<Op, String> {
        let [dst, a, b] = fixed(operands)?;
        Ok(Op::Binary {
            op,
            ty,
            dst: self.operands.register(dst, exactly(ty))?,
            a: self.operands.value(a, exactly(ty))?,
            b: self.operands.value(b, 32..=32)?,
        })
    }

    /// A predicate from two numbers.
    fn compare(&mut self, comparison: &str, kind: &str, operands: &[&str]) -> Result<Op, String> {
        let [dst, a, b] = fixed(operands)?;
        let (op, kinds, a, b) = match comparison {
            "eq" => (Binary::Equal, "bus", a, b),
            "ne" => (Binary::NotEqual, "bus", a, b),
            "lt" => (Binary::Less, "us", a, b),
            "le" => (Binary::LessEqual, "us", a, b),
            "gt" => (Binary::Less, "us", b, a),
            "ge" => (Binary::LessEqual, "us", b, a),
            "lo" => (Binary::Less, "u", a, b),
            "ls" => (Binary::LessEqual, "u", a, b),
            "hi" => (Binary::Less, "u", b, a),
            "hs" => (Binary::LessEqual, "u", b, a),
            _ => return Err(format!("no such comparison: {comparison}")),
        };
        let ty = ty(kind, kinds, 16..=64)?;
        Ok(Op::Binary {
            op,
            ty,
            dst: self.operands.register(dst, 1..=1)?,
            a: self.operands.value(a, exactly(ty))?,
            b: self.operands.value(b, exactly(ty))?,
        })
    }

    fn param(&mut self, ty: Type, operands: &[&str]) -> Result<Op, String> {
        let [dst, from] = fixed(operands)?;
        let name = from
            .strip_prefix('[')
            .and_then(|name| name.strip_suffix(']'))
            .unwrap_or_default();
        let param = self
            .params
            .iter()
            .find(|param| param.name == name && param.ty.bits >= ty.bits);
        let param = param.ok_or_else(|| format!("no such parameter: {from}"))?;
        Ok(Op::Param {
            ty,
            dst: self.operands.register(dst, at_least(ty))?,
            at: param.at,
        })
    }

    /// An access to memory without its registers: its qualifiers, of which one may be of the cache,
    /// and its address.
    fn access(
        &mut self,
        how: &[&str],
        caches: &[&str],
        kind: &str,
        address: &str,
    ) -> Result<Access, String> {
        let how = how.strip_prefix(&["global"]).unwrap_or(how);
        let (count, cache) = match how {
            [cache @ .., "v2"] => (2, cache),
            [cache @ .., "v4"] => (4, cache),
            cache => (1, cache),
        };
        if cache.len() > 1 || !cache.iter().all(|cache| caches.contains(cache)) {
            return Err("no such access to memory".to_owned());
        }
        let address = address
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'));
        let address = address.ok_or("no address in brackets")?;
        let (base, offset) = address.split_once('+').unwrap_or((address, "0"));
        let ty = ty(kind, "bus", 8..=64)?;
        if ty.bytes() * count > 16 {
            return Err("more than 16 bytes at once".to_owned());
        }
        Ok(Access {
            ty,
            base: self.operands.register(base.trim(), 64..=64)?,
            offset: i32::try_from(integer(offset.trim())? as i64).map_err(|e| e.to_string())?,
            count: count as u8,
            slots: [0; 4],
        })
    }
}

/// The operation of a product, the type of its factors, and the type of what is kept of it.
fn product(part: &str, kind: &str) -> Result<(Binary, Type, Type), String> {
    let factors = ty(kind, "us", 16..=64)?;
    match part {
        "lo" => Ok((Binary::Mul, factors, factors)),
        "hi" => Ok((Binary::MulHigh, factors, factors)),
        "wide" if factors.bits <= 32 => {
            let bits = 2 * factors.bits;
            Ok((Binary::Mul, factors, Type { bits, ..factors }))
        }
        _ => Err(format!("no such product: {part}")),
    }
}

/// An access with the registers of `list`: as many in braces as it has elements, or the only one.
fn filled(
    mut access: Access,
    list: &str,
    mut slot: impl FnMut(&str) -> Result<u16, String>,
) -> Result<Access, String> {
    let names = match list
        .strip_prefix('{')
        .and_then(|rest| rest.strip_suffix('}'))
    {
        Some(names) if access.count > 1 => split(names),
        _ => vec![list],
    };
    if names.len() != usize::from(access.count) {
        return Err(format!("not {} registers: {list}", access.count));
    }
    for (place, name) in access.slots.iter_mut().zip(names) {
        *place = slot(name)?;
    }
    Ok(access)
}

/// Operands, separated by commas outside of braces.
fn split(operands: &str) -> Vec<&str> {
    if operands.is_empty() {
        return Vec::new();
    }
    let mut inside = false;
    let parts = operands.split(|c| {
        inside = c == '{' || inside && c != '}';
        c == ',' && !inside
    });
    parts.map(str::trim).collect()
}

/// Exactly so many operands.
fn fixed<'a, const N: usize>(operands: &[&'a str]) -> Result<[&'a str; N], String> {
    operands
        .try_into()
        .map_err(|_| format!("takes {N} operands, not {}", operands.len()))
}
