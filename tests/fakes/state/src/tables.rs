//! MIG profile tables, transcribed from public captures of `nvidia-smi mig -lgip` and `-lgipp`.
//!
//! Grids depend on driver and chip: programs must discover them, only tests may compare with these.

use crate::mig::{ComputeProfile, Engines, Profile, Table};

const fn engines(copy: u32, decoder: u32, encoder: u32, jpeg: u32, ofa: u32) -> Engines {
    Engines { copy, decoder, encoder, jpeg, ofa }
}

const fn compute(enum_value: u32, id: u32, slices: u32, max: u32) -> ComputeProfile {
    ComputeProfile { enum_value, id, slices, max }
}

/// Compute profiles by the slices of the GPU instance: enum, id, slices, how many fit.
const C1: &[ComputeProfile] = &[compute(0, 0, 1, 1)];
/// The double-memory 1g has a compute profile of its own (`NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1`).
const C1_DOUBLE: &[ComputeProfile] = &[compute(7, 7, 1, 1)];
const C2: &[ComputeProfile] = &[compute(0, 0, 1, 2), compute(1, 1, 2, 1)];
const C3: &[ComputeProfile] = &[compute(0, 0, 1, 3), compute(1, 1, 2, 1), compute(2, 2, 3, 1)];
const C4: &[ComputeProfile] = &[compute(0, 0, 1, 4), compute(1, 1, 2, 2), compute(3, 3, 4, 1)];
const C7: &[ComputeProfile] = &[
    compute(0, 0, 1, 7),
    compute(1, 1, 2, 3),
    compute(2, 2, 3, 2),
    compute(3, 3, 4, 1),
    compute(4, 4, 7, 1),
];

const ONES_OF_7: &[u32] = &[0, 1, 2, 3, 4, 5, 6];
const ONES_OF_4: &[u32] = &[0, 1, 2, 3];

/// What differs between cards of the eight-unit family.
struct Eight {
    names: [&'static str; 7],
    memory_mib: [u64; 7],
    sms: [u32; 7],
    engines: [Engines; 7],
}

/// Rows in the order 1g, 1g+me, 1g double, 2g, 3g, 4g, 7g.
const fn eight(of: &Eight) -> [Profile; 7] {
    const fn row(of: &Eight, i: usize, shape: &Profile) -> Profile {
        Profile {
            name: of.names[i],
            memory_mib: of.memory_mib[i],
            sms: of.sms[i],
            engines: of.engines[i],
            ..*shape
        }
    }
    const fn shape(
        (enum_value, id): (u32, u32),
        (slices, size, max): (u32, u32, u32),
        starts: &'static [u32],
        compute: &'static [ComputeProfile],
    ) -> Profile {
        Profile {
            enum_value,
            id,
            name: "",
            slices,
            size,
            starts,
            max,
            memory_mib: 0,
            sms: 0,
            engines: engines(0, 0, 0, 0, 0),
            graphics: false,
            compute,
        }
    }
    [
        row(of, 0, &shape((0, 19), (1, 1, 7), ONES_OF_7, C1)),
        row(of, 1, &shape((7, 20), (1, 1, 1), ONES_OF_7, C1)),
        row(of, 2, &shape((9, 15), (1, 2, 4), &[0, 2, 4, 6], C1_DOUBLE)),
        row(of, 3, &shape((1, 14), (2, 2, 3), &[0, 2, 4], C2)),
        row(of, 4, &shape((2, 9), (3, 4, 2), &[0, 4], C3)),
        row(of, 5, &shape((3, 5), (4, 4, 1), &[0], C4)),
        row(of, 6, &shape((4, 0), (7, 8, 1), &[0], C7)),
    ]
}

const A100_SMS: [u32; 7] = [14, 14, 14, 28, 42, 56, 98];
const H100_SMS: [u32; 7] = [16, 16, 26, 32, 60, 64, 132];

const A100_ENGINES: [Engines; 7] = [
    engines(1, 0, 0, 0, 0),
    engines(1, 1, 0, 1, 1),
    engines(1, 1, 0, 0, 0),
    engines(2, 1, 0, 0, 0),
    engines(3, 2, 0, 0, 0),
    engines(4, 2, 0, 0, 0),
    engines(7, 5, 0, 1, 1),
];
const H100_ENGINES: [Engines; 7] = [
    engines(1, 1, 0, 1, 0),
    engines(1, 1, 0, 1, 1),
    engines(1, 1, 0, 1, 0),
    engines(2, 2, 0, 2, 0),
    engines(3, 3, 0, 3, 0),
    engines(4, 4, 0, 4, 0),
    engines(8, 7, 0, 7, 1),
];

const A100_40_ROWS: &[Profile] = &eight(&Eight {
    names: ["1g.5gb", "1g.5gb+me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"],
    memory_mib: [4864, 4864, 9856, 9856, 19968, 19968, 40192],
    sms: A100_SMS,
    engines: A100_ENGINES,
});
const A100_80_ROWS: &[Profile] = &eight(&Eight {
    names: ["1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"],
    memory_mib: [9856, 9856, 19968, 19968, 40192, 40192, 80384],
    sms: A100_SMS,
    engines: A100_ENGINES,
});
const H100_80_ROWS: &[Profile] = &eight(&Eight {
    names: ["1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"],
    memory_mib: [9984, 9984, 20096, 20096, 40448, 40448, 81152],
    sms: H100_SMS,
    engines: H100_ENGINES,
});
const H200_ROWS: &[Profile] = &eight(&Eight {
    names: ["1g.18gb", "1g.18gb+me", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"],
    memory_mib: [16384, 16384, 33024, 33024, 71168, 71168, 143_104],
    sms: H100_SMS,
    engines: H100_ENGINES,
});

const A30_ROWS: &[Profile] = &[
    a30((0, 14, "1g.6gb"), (1, 4), ONES_OF_4, 5952, engines(1, 0, 0, 0, 0), C1),
    a30((7, 21, "1g.6gb+me"), (1, 1), ONES_OF_4, 5952, engines(1, 1, 0, 1, 1), C1),
    a30((1, 5, "2g.12gb"), (2, 2), &[0, 2], 11968, engines(2, 2, 0, 0, 0), C2),
    a30((8, 6, "2g.12gb+me"), (2, 1), &[0, 2], 11968, engines(2, 2, 0, 1, 1), C2),
    a30((3, 0, "4g.24gb"), (4, 1), &[0], 24000, engines(4, 4, 0, 1, 1), C4),
];

const fn a30(
    (enum_value, id, name): (u32, u32, &'static str),
    (slices, max): (u32, u32),
    starts: &'static [u32],
    memory_mib: u64,
    engines: Engines,
    compute: &'static [ComputeProfile],
) -> Profile {
    Profile {
        enum_value,
        id,
        name,
        slices,
        size: slices,
        starts,
        max,
        memory_mib,
        sms: 14 * slices,
        engines,
        graphics: false,
        compute,
    }
}

const RTX_ROWS: &[Profile] = &[
    rtx1((0, 14, "1g.24gb"), 4, engines(1, 1, 1, 1, 0), false),
    rtx1((7, 21, "1g.24gb+me"), 1, engines(1, 1, 1, 1, 1), false),
    rtx1((10, 47, "1g.24gb+gfx"), 4, engines(1, 1, 1, 1, 0), true),
    rtx1((15, 65, "1g.24gb+me.all"), 1, engines(1, 4, 4, 4, 1), false),
    rtx1((13, 67, "1g.24gb-me"), 4, engines(1, 0, 0, 0, 0), false),
    rtx2((1, 5, "2g.48gb"), 2, engines(2, 2, 2, 2, 0), false),
    rtx2((11, 35, "2g.48gb+gfx"), 2, engines(2, 2, 2, 2, 0), true),
    rtx2((16, 64, "2g.48gb+me.all"), 1, engines(2, 4, 4, 4, 1), false),
    rtx2((14, 66, "2g.48gb-me"), 2, engines(2, 0, 0, 0, 0), false),
    rtx4((3, 0, "4g.96gb"), false),
    rtx4((12, 32, "4g.96gb+gfx"), true),
];

const fn rtx1(
    (enum_value, id, name): (u32, u32, &'static str),
    max: u32,
    engines: Engines,
    graphics: bool,
) -> Profile {
    let (starts, compute): (&[u32], _) = (&[0, 3, 6, 9], C1);
    let (slices, size, memory_mib, sms) = (1, 3, 24192, 46);
    Profile { enum_value, id, name, slices, size, starts, max, memory_mib, sms, engines, graphics, compute }
}

const fn rtx2(
    (enum_value, id, name): (u32, u32, &'static str),
    max: u32,
    engines: Engines,
    graphics: bool,
) -> Profile {
    let (starts, compute): (&[u32], _) = (&[0, 6], C2);
    let (slices, size, memory_mib, sms) = (2, 6, 48512, 94);
    Profile { enum_value, id, name, slices, size, starts, max, memory_mib, sms, engines, graphics, compute }
}

const fn rtx4((enum_value, id, name): (u32, u32, &'static str), graphics: bool) -> Profile {
    let (starts, compute): (&[u32], _) = (&[0], C4);
    let (slices, size, max, memory_mib, sms) = (4, 12, 1, 97408, 188);
    let engines = engines(4, 4, 4, 4, 1);
    Profile { enum_value, id, name, slices, size, starts, max, memory_mib, sms, engines, graphics, compute }
}

/// Every table by name.
pub(crate) const TABLES: &[Table] = &[
    Table { name: "a100-40", rows: A100_40_ROWS },
    Table { name: "a100-80", rows: A100_80_ROWS },
    Table { name: "a30", rows: A30_ROWS },
    Table { name: "h100-80", rows: H100_80_ROWS },
    Table { name: "h200", rows: H200_ROWS },
    Table { name: "rtxpro6000", rows: RTX_ROWS },
];
