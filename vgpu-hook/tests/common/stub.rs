//! A driver that exports every function there is and does nothing: `libcuda.so.1` and `libnvidia-ml.so.1`, made from the
//! list of functions. It resolves names as NVIDIA's does, so that what the library answers can be compared.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use super::{compile, driver_functions};

/// One form of a driver function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Form {
    /// Without version and flavour.
    pub base: &'static str,
    pub per_thread: bool,
    pub since: u32,
    pub symbol: &'static str,
}

/// All forms, sorted.
pub fn forms() -> Vec<Form> {
    let mut forms: Vec<Form> = driver_functions()
        .into_iter()
        .map(|(symbol, since, _)| {
            let plain = symbol.strip_suffix("_ptds").or_else(|| symbol.strip_suffix("_ptsz"));
            let name = plain.unwrap_or(symbol);
            let base = name
                .rsplit_once("_v")
                .filter(|(_, v)| v.parse::<u32>().is_ok())
                .map_or(name, |(base, _)| base);
            Form { base, per_thread: plain.is_some(), since, symbol }
        })
        .collect();
    forms.sort();
    forms
}

/// What the driver gives for a name, as `cuda.h` describes it.
pub fn expected(forms: &[Form], base: &str, version: u32, per_thread: bool) -> Option<&'static str> {
    let newest = |flavour| {
        forms
            .iter()
            .filter(|form| form.base == base && form.per_thread == flavour && form.since <= version)
            .max_by_key(|form| form.since)
            .map(|form| form.symbol)
    };
    per_thread.then(|| newest(true)).flatten().or_else(|| newest(false))
}

/// NVML's functions that the stub has.
pub const NVML: &[&str] = &[
    "nvmlInit_v2",
    "nvmlInitWithFlags",
    "nvmlShutdown",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetRunningProcessDetailList",
];

/// Writes and compiles both libraries into `folder` with `compiler`; returns the folder.
pub fn build(folder: &Path, compiler: &str) -> PathBuf {
    let mut source = String::from("#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n");
    // What a test asks: which function was called last.
    source += "const char *stub_called = \"\";\n";
    let plain = |form: &Form| !matches!(form.base, "cuGetProcAddress" | "cuInit" | "cuDriverGetVersion");
    for Form { symbol, .. } in forms().into_iter().filter(plain) {
        writeln!(source, "int {symbol}(void) {{ stub_called = \"{symbol}\"; return 999; }}").unwrap();
    }
    source += "int cuGetProcAddress(const char *n, void **p, int v, unsigned long f);\n\
        int cuDriverGetVersion(int *v) { stub_called = \"cuDriverGetVersion\"; *v = 13050; return 0; }\n";
    // HK-03: a driver that calls back into exported symbols while it starts.
    source += "int cuInit(unsigned f) { int v = 0; unsigned long a = 0, b = 0; void *p = 0; (void)f;\n\
        cuDriverGetVersion(&v);\n\
        int (*volatile info)(unsigned long *, unsigned long *) = (void *)cuMemGetInfo_v2; info(&a, &b);\n\
        int (*volatile total)(unsigned long *, int) = (void *)cuDeviceTotalMem_v2; total(&a, 0);\n\
        cuGetProcAddress(\"cuMemAlloc\", &p, 12000, 0); stub_called = \"cuInit\"; return 0; }\n";
    // A form of the future, which nothing exports.
    source += "static int future(void) { return 999; }\n";
    source += "int cuGetProcAddress_v2(const char *n, void **p, int v, unsigned long f, int *s);\n\
        int cuGetProcAddress_ptsz(const char *n, void **p, int v, unsigned long f) { return cuGetProcAddress(n, p, v, f ? f : 2); }\n\
        int cuGetProcAddress_v2_ptsz(const char *n, void **p, int v, unsigned long f, int *s) { return cuGetProcAddress_v2(n, p, v, f ? f : 2, s); }\n";
    source +=
        "static const struct { const char *base; int per_thread, since; void *function; } forms[] = {\n";
    for form in forms() {
        let Form { base, per_thread, since, symbol } = form;
        writeln!(source, "{{\"{base}\", {}, {since}, (void *){symbol}}},", i32::from(per_thread)).unwrap();
    }
    source += "};\n\
        static int find(const char *n, void **p, int v, unsigned long f, int *s) {\n\
          int known = 0, best = -1, best_per_thread = -1;\n\
          const char *log = getenv(\"STUB_LOG\");\n\
          if (log) { FILE *file = fopen(log, \"a\"); fprintf(file, \"%s %d %lu\\n\", n, v, f); fclose(file); }\n\
          *p = 0;\n\
          if (v > 13050) { if (!strcmp(n, \"cuMemAlloc\") && v >= 14000) { *p = (void *)future; if (s) *s = 0; return 0; } }\n\
          for (int i = 0; i < (int)(sizeof forms / sizeof *forms); i++) {\n\
            if (strcmp(forms[i].base, n)) continue;\n\
            known = 1;\n\
            if (forms[i].since > v) continue;\n\
            if (forms[i].per_thread) best_per_thread = i; else best = i;\n\
          }\n\
          if ((f & 2) && best_per_thread >= 0) best = best_per_thread;\n\
          if (best >= 0) *p = forms[best].function;\n\
          if (s) *s = best >= 0 ? 0 : known ? 2 : 1;\n\
          return 0;\n\
        }\n\
        int cuGetProcAddress(const char *n, void **p, int v, unsigned long f) { if (!n || !p) return 1; find(n, p, v, f, 0); return *p ? 0 : 500; }\n\
        int cuGetProcAddress_v2(const char *n, void **p, int v, unsigned long f, int *s) { if (!n || !p) return 1; return find(n, p, v, f, s); }\n";
    library(folder, compiler, "libcuda.so.1", &source);

    let mut source = String::from("const char *nvml_stub_called = \"\";\n");
    // HK-03: one start-up function calls the other by its exported name.
    source += "int nvmlInitWithFlags(unsigned f) { (void)f; return 0; }\nint nvmlInit_v2(void) { return nvmlInitWithFlags(0); }\n";
    for name in NVML.iter().filter(|name| !name.starts_with("nvmlInit")) {
        writeln!(source, "int {name}(void) {{ nvml_stub_called = \"{name}\"; return 999; }}").unwrap();
    }
    library(folder, compiler, "libnvidia-ml.so.1", &source);
    folder.to_owned()
}

fn library(folder: &Path, compiler: &str, name: &str, source: &str) {
    let file = folder.join(format!("{name}.c"));
    std::fs::write(&file, source).unwrap();
    let soname = format!("-Wl,-soname,{name}");
    compile(compiler, &[&file], &folder.join(name), &["-shared", "-fPIC", &soname]);
}
