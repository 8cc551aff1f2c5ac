//! Every form of every opcode on known values.

use super::super::{Fault, Module};
use super::{Ram, source};

const BASE: u64 = 0x7000_0000_8090;

/// Runs a body over memory, by default with one thread; returns the memory afterwards.
fn run(body: &str, params: [u64; 3], block: [u32; 3], memory: Vec<u8>) -> Result<Vec<u8>, Fault> {
    let module = Module::parse(&source(body)).unwrap();
    let kernel = module.kernel("f").unwrap();
    assert_eq!(kernel.params(), [8, 4, 8]);
    let buffer: Vec<u8> = params
        .iter()
        .flat_map(|param| param.to_le_bytes())
        .collect();
    let ram = Ram::new(BASE, memory);
    kernel.run([1, 1, 1], block, &buffer, &ram)?;
    Ok(ram.bytes.into_inner().unwrap())
}

/// The result of one instruction. It reads `%rd1` to `%rd3`, or the low bits of the same numbers in
/// `%r1`, `%rs1` and so on, or in `%p1` to `%p3` whether they are not zero, and writes register 0
/// of some kind.
fn value(instruction: &str, inputs: [u64; 3]) -> u64 {
    let mut body = String::new();
    for (i, input) in (1..).zip(inputs) {
        body += &format!(
            "mov.b64 %rd{i}, {input};\ncvt.u32.u64 %r{i}, %rd{i};\ncvt.u16.u64 %rs{i}, %rd{i};\n"
        );
        body += &format!("setp.ne.b64 %p{i}, %rd{i}, 0;\n");
    }
    body += instruction;
    body += "\nld.param.u64 %rd7, [f_param_0];\n";
    let written = instruction
        .split_whitespace()
        .find(|word| word.ends_with("0,"));
    body += match written.unwrap() {
        "%rd0," => "st.global.u64 [%rd7], %rd0;",
        "%r0," => "st.global.u32 [%rd7], %r0;",
        "%rs0," => "st.global.u16 [%rd7], %rs0;",
        _ => "selp.u32 %r7, 1, 0, %p0;\nst.global.u32 [%rd7], %r7;",
    };
    let memory = run(&body, [BASE, 0, 0], [1, 1, 1], vec![0; 8]).unwrap();
    u64::from_le_bytes(memory.try_into().unwrap())
}

/// Instructions, their inputs, and their expected results.
fn check(known: &[(&str, [u64; 3], u64)]) {
    for (instruction, inputs, expected) in known {
        let given = value(instruction, *inputs);
        assert_eq!(
            given, *expected,
            "{instruction} of {inputs:x?} gave {given:#x}, not {expected:#x}"
        );
    }
}

const NEGATIVE: u64 = -1i64 as u64;

#[test]
fn moves() {
    check(&[
        ("mov.u16 %rs0, %rs1;", [0x12345, 0, 0], 0x2345),
        ("mov.b32 %r0, %r1;", [NEGATIVE, 0, 0], 0xffff_ffff),
        ("mov.s64 %rd0, -2;", [0, 0, 0], NEGATIVE - 1),
        ("mov.u64 %rd0, 0xFFFFFFFFFFFFFFFF;", [0, 0, 0], NEGATIVE),
        ("mov.u32 %r0, 7U;", [0, 0, 0], 7),
        ("mov.pred %p0, %p1;", [5, 0, 0], 1),
        ("mov.pred %p0, -1;", [0, 0, 0], 1),
        ("mov.pred %p0, 0;", [0, 0, 0], 0),
        ("cvta.to.global.u64 %rd0, %rd1;", [BASE, 0, 0], BASE),
        ("cvta.global.u64 %rd0, %rd1;", [BASE, 0, 0], BASE),
        ("selp.b16 %rs0, %rs1, %rs2, %p3;", [4, 5, 1], 4),
        ("selp.u32 %r0, %r1, %r2, %p3;", [4, 5, 0], 5),
        ("selp.s64 %rd0, -1, %rd2, %p3;", [4, 5, 1], NEGATIVE),
    ]);
}

#[test]
fn conversions() {
    check(&[
        ("cvt.u64.u32 %rd0, %r1;", [NEGATIVE, 0, 0], 0xffff_ffff),
        (
            "cvt.s64.s32 %rd0, %r1;",
            [0x8000_0000, 0, 0],
            0xffff_ffff_8000_0000,
        ),
        (
            "cvt.u64.s32 %rd0, %r1;",
            [0x8000_0000, 0, 0],
            0xffff_ffff_8000_0000,
        ),
        ("cvt.s64.u32 %rd0, %r1;", [0x8000_0000, 0, 0], 0x8000_0000),
        ("cvt.u32.u64 %r0, %rd1;", [0x1_0000_0002, 0, 0], 2),
        ("cvt.u16.u32 %rs0, %r1;", [0x1_2345, 0, 0], 0x2345),
        ("cvt.u32.u16 %r0, %rs1;", [0xffff, 0, 0], 0xffff),
        ("cvt.s32.s16 %r0, %rs1;", [0x8000, 0, 0], 0xffff_8000),
        // Eight bits live in wider registers, extended by the sign of what is written.
        ("cvt.u32.u8 %r0, %r1;", [0x1ff, 0, 0], 0xff),
        ("cvt.s32.s8 %r0, %rs1;", [0x1ff, 0, 0], 0xffff_ffff),
        ("cvt.s8.u32 %rs0, %r1;", [0x80, 0, 0], 0xff80),
        ("cvt.u8.u32 %rs0, %r1;", [0x180, 0, 0], 0x80),
        ("cvt.s16.s8 %rs0, %rs1;", [0x7f, 0, 0], 0x7f),
    ]);
}

#[test]
fn sums() {
    check(&[
        ("add.u16 %rs0, %rs1, %rs2;", [0xffff, 2, 0], 1),
        ("add.s16 %rs0, %rs1, -1;", [0, 0, 0], 0xffff),
        ("add.u32 %r0, %r1, %r2;", [0xffff_ffff, 2, 0], 1),
        ("add.s32 %r0, %r1, 5;", [7, 0, 0], 12),
        ("add.u64 %rd0, %rd1, %rd2;", [NEGATIVE, 2, 0], 1),
        ("add.s64 %rd0, %rd1, -16;", [BASE, 0, 0], BASE - 16),
        ("sub.u16 %rs0, %rs1, %rs2;", [1, 2, 0], 0xffff),
        ("sub.s32 %r0, %r1, %r2;", [1, 2, 0], 0xffff_ffff),
        ("sub.u64 %rd0, %rd1, %rd2;", [1, 2, 0], NEGATIVE),
        ("neg.s16 %rs0, %rs1;", [1, 0, 0], 0xffff),
        ("neg.s32 %r0, %r1;", [0x8000_0000, 0, 0], 0x8000_0000),
        ("neg.s64 %rd0, %rd1;", [5, 0, 0], NEGATIVE - 4),
        ("min.u32 %r0, %r1, %r2;", [0xffff_ffff, 2, 0], 2),
        ("min.s32 %r0, %r1, %r2;", [0xffff_ffff, 2, 0], 0xffff_ffff),
        ("max.u64 %rd0, %rd1, %rd2;", [NEGATIVE, 2, 0], NEGATIVE),
        ("max.s64 %rd0, %rd1, %rd2;", [NEGATIVE, 2, 0], 2),
        ("max.s16 %rs0, %rs1, %rs2;", [0x8000, 2, 0], 2),
    ]);
}

#[test]
fn products() {
    check(&[
        ("mul.lo.u16 %rs0, %rs1, %rs2;", [0x101, 0x100, 0], 0x100),
        (
            "mul.lo.s32 %r0, %r1, %r2;",
            [0xffff_ffff, 3, 0],
            0xffff_fffd,
        ),
        (
            "mul.lo.u64 %rd0, %rd1, %rd2;",
            [NEGATIVE, 3, 0],
            NEGATIVE - 2,
        ),
        ("mul.lo.s64 %rd0, %rd1, 24;", [1 << 40, 0, 0], 24 << 40),
        ("mul.hi.u16 %rs0, %rs1, %rs2;", [0xffff, 0xffff, 0], 0xfffe),
        (
            "mul.hi.u32 %r0, %r1, %r2;",
            [0xffff_ffff, 0xffff_ffff, 0],
            0xffff_fffe,
        ),
        (
            "mul.hi.s32 %r0, %r1, %r2;",
            [0xffff_ffff, 3, 0],
            0xffff_ffff,
        ),
        (
            "mul.hi.u64 %rd0, %rd1, %rd2;",
            [NEGATIVE, NEGATIVE, 0],
            NEGATIVE - 1,
        ),
        ("mul.hi.s64 %rd0, %rd1, %rd2;", [NEGATIVE, 3, 0], NEGATIVE),
        (
            "mul.hi.s64 %rd0, %rd1, %rd2;",
            [1 << 63, 1 << 63, 0],
            1 << 62,
        ),
        (
            "mul.wide.u16 %r0, %rs1, %rs2;",
            [0xffff, 0xffff, 0],
            0xfffe_0001,
        ),
        ("mul.wide.s16 %r0, %rs1, %rs2;", [0xffff, 3, 0], 0xffff_fffd),
        (
            "mul.wide.u32 %rd0, %r1, %r2;",
            [0xffff_ffff, 0xffff_ffff, 0],
            0xffff_fffe_0000_0001,
        ),
        (
            "mul.wide.s32 %rd0, %r1, 16;",
            [0xffff_ffff, 0, 0],
            NEGATIVE - 15,
        ),
        ("mad.lo.u16 %rs0, %rs1, %rs2, %rs3;", [0x100, 0x100, 9], 9),
        ("mad.lo.s32 %r0, %r1, %r2, %r3;", [0xffff_ffff, 3, 5], 2),
        ("mad.lo.u64 %rd0, %rd1, %rd2, %rd3;", [1 << 63, 2, 5], 5),
        ("mad.hi.u32 %r0, %r1, %r2, %r3;", [0x8000_0000, 4, 5], 7),
        ("mad.hi.s64 %rd0, %rd1, %rd2, %rd3;", [NEGATIVE, 1, 1], 0),
        (
            "mad.wide.u32 %rd0, %r1, %r2, %rd3;",
            [0xffff_ffff, 16, BASE],
            BASE + 0xf_ffff_fff0,
        ),
        (
            "mad.wide.s32 %rd0, %r1, 16, %rd3;",
            [0xffff_ffff, 0, BASE],
            BASE - 16,
        ),
        ("mad.wide.s16 %r0, %rs1, %rs2, %r3;", [0xffff, 1, 1], 0),
    ]);
}

#[test]
fn bits() {
    check(&[
        ("and.b16 %rs0, %rs1, %rs2;", [0xff0f, 0x0fff, 0], 0x0f0f),
        ("and.b32 %r0, %r1, -16;", [0xffff_ffff, 0, 0], 0xffff_fff0),
        ("and.b64 %rd0, %rd1, 15;", [BASE + 9, 0, 0], 9),
        ("and.pred %p0, %p1, %p2;", [1, 0, 0], 0),
        ("and.pred %p0, %p1, %p2;", [1, 2, 0], 1),
        ("or.b32 %r0, %r1, %r2;", [0x10, 1, 0], 0x11),
        ("or.b64 %rd0, %rd1, %rd2;", [1 << 63, 1, 0], (1 << 63) + 1),
        ("or.pred %p0, %p1, %p2;", [0, 4, 0], 1),
        ("xor.b16 %rs0, %rs1, %rs2;", [0xffff, 1, 0], 0xfffe),
        ("xor.b32 %r0, %r1, %r2;", [5, 5, 0], 0),
        ("xor.b64 %rd0, %rd1, -1;", [0, 0, 0], NEGATIVE),
        ("xor.pred %p0, %p1, %p2;", [1, 1, 0], 0),
        ("not.b16 %rs0, %rs1;", [1, 0, 0], 0xfffe),
        ("not.b32 %r0, %r1;", [0, 0, 0], 0xffff_ffff),
        ("not.b64 %rd0, %rd1;", [0, 0, 0], NEGATIVE),
        ("not.pred %p0, %p1;", [3, 0, 0], 0),
        ("not.pred %p0, %p1;", [0, 0, 0], 1),
    ]);
}

#[test]
fn shifts_clamp() {
    check(&[
        ("shl.b16 %rs0, %rs1, %r2;", [0x8001, 1, 0], 2),
        ("shl.b16 %rs0, %rs1, 16;", [0xffff, 0, 0], 0),
        ("shl.b32 %r0, %r1, 31;", [3, 0, 0], 0x8000_0000),
        ("shl.b32 %r0, %r1, %r2;", [NEGATIVE, 32, 0], 0),
        ("shl.b64 %rd0, %rd1, %r2;", [3, 63, 0], 1 << 63),
        ("shl.b64 %rd0, %rd1, %r2;", [3, 64, 0], 0),
        ("shl.b64 %rd0, %rd1, %r2;", [3, 0x8000_0000, 0], 0),
        // The amount is 32 bits of its register, all of them.
        ("shl.b64 %rd0, %rd1, %r2;", [3, 0x1_0000_0001, 0], 6),
        ("shr.u16 %rs0, %rs1, 15;", [0xffff, 0, 0], 1),
        ("shr.b32 %r0, %r1, %r2;", [0x8000_0000, 31, 0], 1),
        ("shr.u32 %r0, %r1, %r2;", [0xffff_ffff, 40, 0], 0),
        ("shr.s32 %r0, %r1, %r2;", [0x8000_0000, 40, 0], 0xffff_ffff),
        ("shr.s32 %r0, %r1, 4;", [0x8000_0000, 0, 0], 0xf800_0000),
        ("shr.s32 %r0, %r1, 99;", [0x7fff_ffff, 0, 0], 0),
        ("shr.u64 %rd0, %rd1, 4;", [NEGATIVE, 0, 0], NEGATIVE >> 4),
        ("shr.u64 %rd0, %rd1, 64;", [NEGATIVE, 0, 0], 0),
        ("shr.s64 %rd0, %rd1, 200;", [1 << 63, 0, 0], NEGATIVE),
        ("shr.s16 %rs0, %rs1, 3;", [0x8000, 0, 0], 0xf000),
    ]);
}

#[test]
fn comparisons() {
    // Whether each holds for -1 and 1, for 1 and -1, and for two equal numbers.
    let known = [
        ("eq.b16", [0, 0, 1]),
        ("eq.u32", [0, 0, 1]),
        ("ne.s64", [1, 1, 0]),
        ("ne.b64", [1, 1, 0]),
        ("lt.u16", [0, 1, 0]),
        ("lt.s16", [1, 0, 0]),
        ("lt.u32", [0, 1, 0]),
        ("lt.s64", [1, 0, 0]),
        ("le.u64", [0, 1, 1]),
        ("le.s32", [1, 0, 1]),
        ("gt.u64", [1, 0, 0]),
        ("gt.s64", [0, 1, 0]),
        ("gt.s32", [0, 1, 0]),
        ("ge.u32", [1, 0, 1]),
        ("ge.s64", [0, 1, 1]),
        ("lo.u64", [0, 1, 0]),
        ("ls.u32", [0, 1, 1]),
        ("hi.u64", [1, 0, 0]),
        ("hs.u16", [1, 0, 1]),
    ];
    for (comparison, expected) in known {
        let register = match comparison.trim_start_matches(|c: char| !c.is_ascii_digit()) {
            "16" => "rs",
            "32" => "r",
            _ => "rd",
        };
        let instruction = format!("setp.{comparison} %p0, %{register}1, %{register}2;");
        let inputs = [[NEGATIVE, 1, 0], [1, NEGATIVE, 0], [NEGATIVE, NEGATIVE, 0]];
        assert_eq!(
            inputs.map(|inputs| value(&instruction, inputs)),
            expected,
            "{instruction}"
        );
    }
    check(&[
        ("setp.gt.u64 %p0, %rd1, 15;", [16, 0, 0], 1),
        ("setp.lt.s32 %p0, %r1, -1;", [0, 0, 0], 0),
    ]);
}

#[test]
fn guards_branches_and_ends() {
    check(&[
        ("mov.u32 %r0, 1;\n@%p1 mov.u32 %r0, 2;", [1, 0, 0], 2),
        ("mov.u32 %r0, 1;\n@%p1 mov.u32 %r0, 2;", [0, 0, 0], 1),
        ("mov.u32 %r0, 1;\n@!%p1 mov.u32 %r0, 2;", [1, 0, 0], 1),
        ("mov.u32 %r0, 1;\n@!%p1 mov.u32 %r0, 2;", [0, 0, 0], 2),
        (
            "mov.u32 %r0, 1;\nbra.uni $over;\nmov.u32 %r0, 2;\n$over:",
            [0, 0, 0],
            1,
        ),
        // The sum of the numbers up to 5.
        (
            "mov.u64 %rd0, 0;
            $again:
            add.u64 %rd0, %rd0, %rd1;
            sub.u64 %rd1, %rd1, 1;
            setp.ne.u64 %p1, %rd1, 0;
            @%p1 bra $again;",
            [5, 0, 0],
            15,
        ),
    ]);
    let marks = |end: &str| {
        let body = format!(
            "ld.param.u64 %rd1, [f_param_0];
            mov.u32 %r1, %tid.x;
            cvt.u64.u32 %rd2, %r1;
            add.u64 %rd1, %rd1, %rd2;
            st.u8 [%rd1], 1;
            setp.eq.u32 %p1, %r1, 1;
            {end}
            st.u8 [%rd1], 2;
            $end:"
        );
        run(&body, [BASE, 0, 0], [3, 1, 1], vec![0; 3]).unwrap()
    };
    assert_eq!(marks("@%p1 ret;"), [2, 1, 2]);
    assert_eq!(marks("@!%p1 exit;"), [1, 2, 1]);
    assert_eq!(marks("@%p1 bra $end;"), [2, 1, 2]);
    assert_eq!(marks("ret;"), [1, 1, 1]);
}

#[test]
fn parameters_have_their_places_and_widths() {
    check(&[
        ("ld.param.u16 %rs0, [f_param_0];", [0, 0, 0], BASE & 0xffff),
        ("ld.param.s8 %r0, [f_param_0];", [0, 0, 0], 0xffff_ff90),
        ("ld.param.b64 %rd0, [f_param_0];", [0, 0, 0], BASE),
    ]);
    let body = "ld.param.u64 %rd1, [f_param_0];
        ld.param.s32 %rd2, [f_param_1];
        ld.param.u64 %rd3, [f_param_2];
        st.v2.b64 [%rd1], {%rd2, %rd3};";
    let memory = run(body, [BASE, 0xffff_fffe, 77], [1, 1, 1], vec![0; 16]).unwrap();
    assert_eq!(
        memory,
        [(-2i64).to_le_bytes(), 77i64.to_le_bytes()].concat()
    );
}

/// Copies by one load from `BASE` and one store to `BASE + 32`; what is there afterwards.
fn copied(load: &str, store: &str) -> Vec<u8> {
    let body = format!("ld.param.u64 %rd7, [f_param_0];\n{load}\n{store}");
    let memory: Vec<u8> = (0x81..=0xa0).chain([0; 32]).collect();
    run(&body, [BASE, 0, 0], [1, 1, 1], memory).unwrap()[32..].to_vec()
}

#[test]
fn loads_and_stores_have_their_widths_and_signs() {
    let first = |bytes: &[u8]| [bytes, &vec![0; 32 - bytes.len()]].concat();
    let known: [(&str, &str, &[u8]); 16] = [
        (
            "ld.global.u8 %r1, [%rd7];",
            "st.global.u32 [%rd7+32], %r1;",
            &[0x81, 0, 0, 0],
        ),
        (
            "ld.global.b8 %rs1, [%rd7];",
            "st.global.u16 [%rd7+32], %rs1;",
            &[0x81, 0],
        ),
        (
            "ld.global.s8 %rd1, [%rd7];",
            "st.global.s64 [%rd7+32], %rd1;",
            &[0x81, 255, 255, 255, 255, 255, 255, 255],
        ),
        (
            "ld.global.u16 %r1, [%rd7];",
            "st.global.u32 [%rd7+32], %r1;",
            &[0x81, 0x82, 0, 0],
        ),
        (
            "ld.global.s16 %r1, [%rd7];",
            "st.global.b32 [%rd7+32], %r1;",
            &[0x81, 0x82, 255, 255],
        ),
        (
            "ld.global.b32 %rd1, [%rd7];",
            "st.global.b64 [%rd7+32], %rd1;",
            &[0x81, 0x82, 0x83, 0x84],
        ),
        (
            "ld.global.u64 %rd1, [%rd7+8];",
            "st.global.u8 [%rd7+33], %rd1;",
            &[0, 0x89],
        ),
        (
            "ld.global.nc.u32 %r1, [%rd7+4];",
            "st.global.wb.u32 [%rd7+32], %r1;",
            &[0x85, 0x86, 0x87, 0x88],
        ),
        (
            "ld.global.ca.u16 %rs1, [%rd7];",
            "st.global.cg.u16 [%rd7+32], %rs1;",
            &[0x81, 0x82],
        ),
        (
            "ld.global.cv.u16 %rs1, [%rd7];",
            "st.global.wt.u16 [%rd7+32], %rs1;",
            &[0x81, 0x82],
        ),
        (
            "ld.cg.u8 %rs1, [%rd7];",
            "st.cs.u8 [%rd7+32], %rs1;",
            &[0x81],
        ),
        (
            "ld.global.lu.u8 %rs1, [%rd7+1];",
            "st.b8 [%rd7+32], -2;",
            &[0xfe],
        ),
        (
            "ld.global.cs.v2.u8 {%rs1, %rs2}, [%rd7+2];",
            "st.global.cs.v2.u8 [%rd7+32], {%rs2, %rs1};",
            &[0x84, 0x83],
        ),
        (
            "ld.global.cs.v2.u32 {%r1, %r2}, [%rd7+8];",
            "st.global.cs.v2.u32 [%rd7+40], {%r1, %r2};",
            &[
                0, 0, 0, 0, 0, 0, 0, 0, 0x89, 0x8a, 0x8b, 0x8c, 0x8d, 0x8e, 0x8f, 0x90,
            ],
        ),
        (
            "ld.global.cs.v4.u32 {%r1,%r2,%r3,%r4}, [%rd7+16];",
            "st.global.cs.v4.u32 [%rd7+32], {%r4,%r3,%r2,%r1};",
            &[
                0x9d, 0x9e, 0x9f, 0xa0, 0x99, 0x9a, 0x9b, 0x9c, 0x95, 0x96, 0x97, 0x98, 0x91, 0x92,
                0x93, 0x94,
            ],
        ),
        (
            "add.u64 %rd6, %rd7, 48;\nld.v2.u64 {%rd1, %rd2}, [%rd6+-48];",
            "st.v2.u64 [%rd6+-16], {%rd2, 5};",
            &[0x89, 0x8a, 0x8b, 0x8c, 0x8d, 0x8e, 0x8f, 0x90, 5],
        ),
    ];
    for (load, store, expected) in known {
        assert_eq!(copied(load, store), first(expected), "{load} {store}");
    }
}

#[test]
fn every_thread_of_every_block_knows_its_place() {
    // Thread number in the grid of 3 x 2 x 2 blocks of 2 x 3 x 2, written to the place of that
    // number.
    let module = Module::parse(&source(
        "ld.param.u64 %rd1, [f_param_0];
        mov.u32 %r1, %ctaid.z;
        mad.lo.u32 %r1, %r1, %nctaid.y, %ctaid.y;
        mad.lo.u32 %r1, %r1, %nctaid.x, %ctaid.x;
        mad.lo.u32 %r1, %r1, %ntid.z, %tid.z;
        mad.lo.u32 %r1, %r1, %ntid.y, %tid.y;
        mad.lo.u32 %r1, %r1, %ntid.x, %tid.x;
        mad.wide.u32 %rd1, %r1, 8, %rd1;
        mov.u32 %r2, %nctaid.z;
        ld.u32 %r3, [%rd1+4];
        add.u32 %r3, %r3, %r2;
        st.v2.u32 [%rd1], {%r1, %r3};
        ret;",
    ))
    .unwrap();
    let ram = Ram::new(0, vec![0; 8 * 144]);
    module
        .kernel("f")
        .unwrap()
        .run([3, 2, 2], [2, 3, 2], &[0; 24], &ram)
        .unwrap();
    let expected: Vec<u8> = (0..144u32)
        .flat_map(|i| [i.to_le_bytes(), 2u32.to_le_bytes()].concat())
        .collect();
    assert!(ram.bytes.into_inner().unwrap() == expected);
}

#[test]
fn registers_of_one_thread_are_not_those_of_the_next() {
    let body = "ld.param.u64 %rd1, [f_param_0];
        mov.u32 %r1, %tid.x;
        setp.eq.u32 %p1, %r1, 0;
        @%p1 mov.u32 %r2, 1;
        mad.wide.u32 %rd1, %r1, 4, %rd1;
        st.u32 [%rd1], %r2;";
    let memory = run(body, [BASE, 0, 0], [2, 1, 1], vec![0; 8]).unwrap();
    assert_eq!(memory[..4], [1, 0, 0, 0]);
    assert_ne!(memory[4..], [1, 0, 0, 0]);
}

#[test]
fn accesses_outside_of_memory_and_beside_their_alignment_are_faults() {
    let faults = |access: &str, address: u64| {
        let body = format!("ld.param.u64 %rd1, [f_param_0];\n{access}");
        run(&body, [address, 0, 0], [1, 1, 1], vec![0; 64]).err()
    };
    let wide = [
        "ld.v4.u32 {%r1,%r2,%r3,%r4}, [%rd1];",
        "st.v2.u64 [%rd1], {%rd2, %rd3};",
    ];
    for access in wide {
        assert_eq!(faults(access, BASE + 48), None);
        for misplaced in [BASE + 1, BASE + 4, BASE + 8, BASE + 64, BASE - 16] {
            let fault = Fault {
                address: misplaced,
                len: 16,
            };
            assert_eq!(faults(access, misplaced), Some(fault), "{access}");
        }
    }
    assert_eq!(faults("ld.u8 %r1, [%rd1+63];", BASE), None);
    let beyond = Fault {
        address: BASE + 64,
        len: 1,
    };
    assert_eq!(faults("st.u8 [%rd1+64], %r1;", BASE), Some(beyond));
    assert_eq!(faults("ld.u16 %r1, [%rd1];", BASE + 1).unwrap().len, 2);
    assert_eq!(faults("ld.u64 %rd1, [%rd1];", BASE + 4).unwrap().len, 8);
    assert_eq!(
        faults("ld.u64 %rd1, [%rd1+-8];", 0).unwrap().address,
        NEGATIVE - 7
    );
}

#[test]
fn what_was_stored_before_a_fault_stays() {
    let module = Module::parse(&source(
        "mov.u32 %r1, %tid.x;
        cvt.u64.u32 %rd1, %r1;
        st.u8 [%rd1], 1;",
    ))
    .unwrap();
    let ram = Ram::new(0, vec![0; 3]);
    let fault = module
        .kernel("f")
        .unwrap()
        .run([1, 1, 1], [9, 1, 1], &[0; 24], &ram)
        .unwrap_err();
    assert_eq!(fault, Fault { address: 3, len: 1 });
    assert_eq!(ram.bytes.into_inner().unwrap(), [1, 1, 1]);
}
