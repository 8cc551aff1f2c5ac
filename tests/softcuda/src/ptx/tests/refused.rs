//! Unsupported text is an error with its line.

use super::super::Module;
use super::source;

fn refused(text: &str) -> String {
    Module::parse(text).unwrap_err()
}

#[test]
fn instructions() {
    let known = [
        ("bar.sync 0;", "no such instruction"),
        ("fma.rn.f32 %r1, %r2, %r3, %r4;", "no such instruction"),
        ("atom.global.add.u32 %r1, [%rd1], 1;", "no such instruction"),
        ("add.u32 %r1, %r2, %r3", "no instruction ends like this"),
        ("{", "no instruction ends like this"),
        (".shared .b8 buffer[16];", "no such instruction"),
        ("add.f32 %r1, %r2, %r3;", "no such type here: f32"),
        ("add.u8 %r1, %r2, %r3;", "no such type here: u8"),
        ("add.b32 %r1, %r2, %r3;", "no such type here: b32"),
        ("and.p32 %r1, %r2, %r3;", "no such type here: p32"),
        ("and.u32 %r1, %r2, %r3;", "no such type here: u32"),
        ("setp.lt.b32 %p1, %r2, %r3;", "no such type here: b32"),
        ("setp.lo.s32 %p1, %r2, %r3;", "no such type here: s32"),
        ("setp.equ.u32 %p1, %r2, %r3;", "no such comparison: equ"),
        ("setp.lt.and.u32 %p1, %r2, %r3, %p2;", "no such instruction"),
        ("mul.wide.u64 %rd1, %rd2, %rd3;", "no such product: wide"),
        ("mul.24.u32 %r1, %r2, %r3;", "no such product: 24"),
        ("cvt.rn.f32.u32 %r1, %r2;", "no such instruction"),
        ("cvt.f32.u32 %r1, %r2;", "no such type here: f32"),
        ("add.u32 %r1, %r2;", "takes 3 operands, not 2"),
        ("add.u32 %r1, %r2, %r3, %r4;", "takes 3 operands, not 4"),
        ("ret 1;", "takes 0 operands, not 1"),
        ("add.u32 %r8, %r2, %r3;", "no such register: %r8"),
        ("add.u32 %f1, %r2, %r3;", "no such register: %f1"),
        ("add.u32 %r1, %r2, %laneid;", "no such register: %laneid"),
        ("add.u32 %tid.x, %r2, %r3;", "no such register: %tid.x"),
        ("add.u32 1, %r2, %r3;", "no such register: 1"),
        ("add.u32 %rd1, %r2, %r3;", "%rd1 is 64 bits wide"),
        ("add.u64 %rd1, %rd2, %r3;", "%r3 is 32 bits wide"),
        ("add.u64 %rd1, %rd2, %tid.x;", "%tid.x is 32 bits wide"),
        ("cvt.u64.u32 %r1, %r2;", "%r1 is 32 bits wide"),
        ("selp.u32 %r1, %r2, %r3, %r4;", "%r4 is 32 bits wide"),
        (
            "add.u32 %r1, %r2, 0f3F800000;",
            "not understood: 0f3F800000",
        ),
        ("add.u32 %r1, %r2, 010;", "not understood: 010"),
        ("add.u32 %r1, %r2, x;", "not understood: x"),
        ("@%p8 ret;", "no such register: %p8"),
        ("@%r1 ret;", "%r1 is 32 bits wide"),
        ("@%p1;", "a guard of nothing"),
        ("bra $nowhere;", "no such label: $nowhere"),
        (
            "ld.param.u64 %rd1, [f_param_3];",
            "no such parameter: [f_param_3]",
        ),
        (
            "ld.param.u64 %rd1, [f_param_1];",
            "no such parameter: [f_param_1]",
        ),
        ("ld.shared.u32 %r1, [%rd1];", "no such access to memory"),
        (
            "ld.volatile.global.u32 %r1, [%rd1];",
            "no such access to memory",
        ),
        ("ld.global.wt.u32 %r1, [%rd1];", "no such access to memory"),
        ("st.global.nc.u32 [%rd1], %r1;", "no such access to memory"),
        (
            "ld.global.v4.u64 {%rd1,%rd2,%rd3,%rd4}, [%rd5];",
            "more than 16 bytes at once",
        ),
        (
            "ld.global.v4.u32 {%r1,%r2,%r3}, [%rd5];",
            "not 4 registers: {%r1,%r2,%r3}",
        ),
        ("ld.global.u32 {%r1}, [%rd5];", "no such register: {%r1}"),
        ("ld.global.u32 %rs1, [%rd5];", "%rs1 is 16 bits wide"),
        ("ld.global.u32 %r1, %rd5;", "no address in brackets"),
        ("ld.global.u32 %r1, [%r5];", "%r5 is 32 bits wide"),
        ("ld.global.u32 %r1, [buffer];", "no such register: buffer"),
        (".reg .f32 %f<3>;", "no such type here: f32"),
        (".reg .b32 %r<3>;", "these registers are declared already"),
        (".reg .b32 %x;", "not registers"),
        ("$twice:\n$twice:", "this label stands elsewhere too"),
    ];
    for (body, why) in known {
        let text = source(body);
        let wrong = body.lines().last().unwrap();
        let line = 1 + text
            .lines()
            .collect::<Vec<_>>()
            .iter()
            .rposition(|line| *line == wrong)
            .unwrap();
        assert_eq!(refused(&text), format!("line {line}: {wrong}: {why}"));
    }
}

#[test]
fn directives_and_versions() {
    let whole = source("ret;");
    assert!(Module::parse(&whole).is_ok());
    let known = [
        (
            ".version 7.0",
            ".version 7.8",
            "line 2: .version 7.8: expected .version 7.0",
        ),
        (
            ".target sm_70",
            ".target sm_90a",
            "line 3: .target sm_90a: expected .target sm_70",
        ),
        (
            ".address_size 64",
            ".address_size 32",
            "line 4: .address_size 32: expected .address_size 64",
        ),
        (
            ".visible .entry f(",
            ".visible .func f(",
            "line 6: .visible .func f(: no such directive",
        ),
        (
            ".visible .entry f(",
            ".global .u32 x;",
            "line 6: .global .u32 x;: no such directive",
        ),
        (
            ".param .u64 f_param_0",
            ".param .f16 f_param_0",
            "line 7: .param .f16 f_param_0,: no such type here: f16",
        ),
        (
            ".param .u64 f_param_0",
            ".param .align 8 .b8 x[16]",
            "line 7: .param .align 8 .b8 x[16],: not a parameter",
        ),
        (
            ".maxntid 256",
            ".minnctapersm 256",
            "line 11: .minnctapersm 256, 1, 1: no such directive",
        ),
        ("\n}\n", "\n", "the file ends too early"),
    ];
    for (from, to, expected) in known {
        assert_eq!(refused(&whole.replace(from, to)), expected);
    }
    assert_eq!(refused(""), "the file ends too early");
}

#[test]
fn kernels_are_found_by_name() {
    let module = Module::parse(&source("ret;")).unwrap();
    assert!(module.kernel("g").is_none());
    let kernel = module.kernel("f").unwrap();
    assert_eq!(
        (kernel.name(), kernel.params(), kernel.max_threads()),
        ("f", &[8, 4, 8][..], Some(256))
    );
}
