//! One table: exports, look-ups and the versions of the headers.
#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString};

use common::Cuda;
use object::{Object as _, ObjectSymbol as _};

struct Row {
    symbol: String,
    name: String,
    version: i32,
    flavour: String,
}

fn rows() -> Vec<Row> {
    let known = include_str!("../src/symbols.rs").lines();
    let lines = known.chain(include_str!("../src/unsupported.rs").lines());
    lines
        .filter_map(|line| line.trim().strip_suffix(';'))
        .map(|line| {
            // The module stands before the symbol where the driver does something.
            let mut words: Vec<&str> = line.split_whitespace().collect();
            if words.len() == 4 {
                words.insert(0, "unsupported");
            }
            Row {
                symbol: words[1].to_owned(),
                name: words[2].trim_matches('"').to_owned(),
                version: words[3].parse().unwrap(),
                flavour: words[4].to_owned(),
            }
        })
        .collect()
}

#[test]
fn exports_are_the_table_and_the_tests_own() {
    let bytes = std::fs::read(common::built()).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let exported: BTreeSet<String> = file
        .dynamic_symbols()
        .filter(|s| s.is_definition() && s.is_global())
        .map(|s| s.name().unwrap().to_owned())
        .filter(|n| !n.starts_with("fake_cuda_"))
        .collect();
    let table: BTreeSet<String> = rows().into_iter().map(|r| r.symbol).collect();
    let missing: Vec<_> = table.difference(&exported).collect();
    let more: Vec<_> = exported.difference(&table).collect();
    assert!(missing.is_empty() && more.is_empty(), "not exported: {missing:?}; not in the table: {more:?}");
}

fn ask(cuda: &Cuda, name: &CStr, version: i32, flags: u64) -> (i32, u64, u32) {
    let (mut found, mut status) = (1_u64, 9_u32);
    let code = call!(cuda.cuGetProcAddress_v2(name, &mut found, version, flags, &mut status));
    (code, found, status)
}

/// Every row is found by its own name, version and flavour; the newest row of a name by any later version.
#[test]
fn every_row_is_found() {
    let cuda = Cuda::load(&[("FAKE_CUDA_VERSION", "13050")]);
    let mut newest: BTreeMap<(String, bool), Row> = BTreeMap::new();
    for row in rows() {
        let name = CString::new(row.name.clone()).unwrap();
        let own = row.flavour != "Legacy";
        // From 12.0 on the plain name means the call with flags.
        let (code, found, status) = ask(&cuda, &name, row.version, if own { 2 } else { 1 });
        let want = (0, cuda.address(&row.symbol), 0);
        assert_eq!((code, found, status), want, "{} {} {}", row.name, row.version, row.flavour);
        let key = (row.name.clone(), own);
        if newest.get(&key).is_none_or(|n| n.version <= row.version) {
            newest.insert(key, row);
        }
    }
    for ((name, own), row) in newest.into_iter().filter(|((n, _), _)| n != "cuGraphInstantiate") {
        let text = CString::new(name).unwrap();
        let (_, found, _) = ask(&cuda, &text, 99_999, if own { 2 } else { 1 });
        assert_eq!(found, cuda.address(&row.symbol), "{}", row.symbol);
    }
}

#[test]
fn versions_and_flags_choose_the_variant() {
    let cuda = Cuda::load(&[("FAKE_CUDA_VERSION", "13000")]);
    for (name, version, flags, want) in [
        (c"cuMemAlloc", 2000, 0, "cuMemAlloc"),
        (c"cuMemAlloc", 3010, 0, "cuMemAlloc"),
        (c"cuMemAlloc", 3020, 0, "cuMemAlloc_v2"),
        (c"cuMemAlloc", 12090, 2, "cuMemAlloc_v2"),
        (c"cuCtxGetDevice", 2000, 0, "cuCtxGetDevice"),
        (c"cuCtxGetDevice", 12090, 0, "cuCtxGetDevice"),
        (c"cuCtxGetDevice", 13000, 0, "cuCtxGetDevice_v2"),
        (c"cuCtxSynchronize", 13000, 0, "cuCtxSynchronize_v2"),
        (c"cuCtxCreate", 3020, 0, "cuCtxCreate_v2"),
        (c"cuCtxCreate", 11040, 0, "cuCtxCreate_v3"),
        (c"cuCtxCreate", 12050, 0, "cuCtxCreate_v4"),
        (c"cuMemAdvise", 8000, 0, "cuMemAdvise"),
        (c"cuMemAdvise", 12020, 0, "cuMemAdvise_v2"),
        (c"cuMemPrefetchAsync", 8000, 2, "cuMemPrefetchAsync_ptsz"),
        (c"cuMemPrefetchAsync", 12020, 2, "cuMemPrefetchAsync_v2_ptsz"),
        (c"cuMemPrefetchAsync", 12020, 1, "cuMemPrefetchAsync_v2"),
        (c"cuGraphInstantiate", 10000, 0, "cuGraphInstantiate"),
        (c"cuGraphInstantiate", 11000, 0, "cuGraphInstantiate_v2"),
        (c"cuGraphInstantiate", 12000, 0, "cuGraphInstantiateWithFlags"),
        (c"cuGraphAddKernelNode", 10000, 0, "cuGraphAddKernelNode"),
        (c"cuGraphAddKernelNode", 12000, 0, "cuGraphAddKernelNode_v2"),
        (c"cuStreamGetCaptureInfo", 10010, 0, "cuStreamGetCaptureInfo"),
        (c"cuStreamGetCaptureInfo", 11030, 2, "cuStreamGetCaptureInfo_v2_ptsz"),
        (c"cuStreamGetCaptureInfo", 12030, 0, "cuStreamGetCaptureInfo_v3"),
        (c"cuLaunchKernel", 7000, 0, "cuLaunchKernel"),
        (c"cuLaunchKernel", 7000, 2, "cuLaunchKernel_ptsz"),
        // Older than the first variant for the thread's own stream.
        (c"cuLaunchKernel", 4000, 2, "cuLaunchKernel"),
        (c"cuMemcpy", 7000, 2, "cuMemcpy_ptds"),
        (c"cuMemcpyHtoD", 7000, 2, "cuMemcpyHtoD_v2_ptds"),
        (c"cuGetProcAddress", 11030, 0, "cuGetProcAddress"),
        (c"cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"),
        (c"cuIpcOpenMemHandle", 4010, 0, "cuIpcOpenMemHandle"),
        (c"cuIpcOpenMemHandle", 11000, 0, "cuIpcOpenMemHandle_v2"),
        (c"cuDeviceGetUuid", 9020, 0, "cuDeviceGetUuid"),
        (c"cuDeviceGetUuid", 11040, 0, "cuDeviceGetUuid_v2"),
        (c"cuMemAllocAsync", 11020, 2, "cuMemAllocAsync_ptsz"),
    ] {
        let got = ask(&cuda, name, version, flags);
        assert_eq!(got, (0, cuda.address(want), 0), "{name:?} {version} {flags}");
        // The form of 11.3 answers the same without a status.
        let mut found = 0_u64;
        ok!(cuda.cuGetProcAddress(name, &mut found, version, flags));
        assert_eq!(found, cuda.address(want), "{name:?} {version} {flags}");
    }
}

#[test]
fn what_is_not_there_is_success_with_null_and_a_reason() {
    let cuda = Cuda::load(&[("FAKE_CUDA_VERSION", "12090")]);
    for (name, version, want) in [
        (c"cuNoSuchThing", 12090, (0, 0, 1)),
        (c"", 12090, (0, 0, 1)),
        (c"cuMemAlloc_v2", 12090, (0, 0, 1)),
        (c"cuMemAllocAsync", 11010, (0, 0, 2)),
        // Only in CUDA 13: this driver does not know it whatever is asked for.
        (c"cuMemGetDefaultMemPool", 13000, (0, 0, 1)),
    ] {
        assert_eq!(ask(&cuda, name, version, 0), want, "{name:?} {version}");
    }
    let (_, found, _) = ask(&cuda, c"cuCtxGetDevice", 13000, 0);
    assert_eq!(found, cuda.address("cuCtxGetDevice"), "a 12.9 driver has the older one only");
    assert_eq!(call!(cuda.cuGetProcAddress_v2(0_u64, 0_u64, 12000, 0_u64, 0_u64)), 1);
}
