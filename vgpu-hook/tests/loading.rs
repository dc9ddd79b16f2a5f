//! Programs under the preloaded library: they start, find what they find without it, and get wrappers for the driver's
//! functions whichever way they ask.
#![cfg(test)]

mod common;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{compile, library, library_for, program, run, stub};
use object::{Object, ObjectSymbol};
use tempfile::TempDir;

fn scratch() -> TempDir {
    TempDir::new().unwrap()
}

/// The program under the library. `MULLION_…` and the loader's variables of the caller do not reach it.
fn preloaded(program: &Path) -> Command {
    let mut command = plain(program);
    command.env("LD_PRELOAD", library());
    command
}

fn plain(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("PATH", "/usr/bin:/bin").env("LC_ALL", "C");
    command
}

fn build(folder: &TempDir, name: &str, flags: &[&str]) -> PathBuf {
    let into = folder.path().join(name);
    let source = name.strip_suffix(".so").unwrap_or(name);
    compile("gcc", &[&program(&format!("{source}.c"))], &into, flags);
    into
}

#[test]
#[ignore = "needs the built library"]
fn programs_of_the_system_start() {
    for (name, arguments) in [
        ("/bin/true", vec![]),
        ("/bin/bash", vec!["-c", "exec 3>/dev/null; (echo sub) >&3; true"]),
        ("/bin/ls", vec!["/"]),
        ("/usr/bin/awk", vec!["BEGIN { print 1 + 1 }"]),
        ("/usr/bin/env", vec!["-i", "/bin/true"]),
    ] {
        for bind_now in [false, true] {
            let mut command = preloaded(Path::new(name));
            command.args(&arguments);
            if bind_now {
                command.env("LD_BIND_NOW", "1");
            }
            run(&mut command).quiet();
        }
    }
}

/// A preloaded library that needs something that is not there ends every program of an image; this one needs nothing, so
/// a C library of any age and kind takes it.
#[test]
#[ignore = "needs the built library"]
fn programs_for_musl_start_as_without_it() {
    let folder = scratch();
    let hello = folder.path().join("hello");
    compile("musl-gcc", &[&program("hello.c")], &hello, &[]);
    let without = run(&mut plain(&hello));
    let with = run(&mut preloaded(&hello));
    assert_eq!((without.code, &*without.stdout), (Some(7), "hello from hello 1\n"));
    assert_eq!((with.code, with.stdout, with.stderr), (without.code, without.stdout, without.stderr));
}

#[test]
#[ignore = "needs the built library"]
fn static_programs_start_as_without_it() {
    let folder = scratch();
    for (kind, flags) in [("static", vec!["-static"]), ("static-pie", vec!["-static-pie"])] {
        let hello = folder.path().join(kind);
        compile("gcc", &[&program("hello.c")], &hello, &flags);
        let with = run(&mut preloaded(&hello));
        assert_eq!((with.code, with.stderr.as_str()), (Some(7), ""), "{kind}");
    }
}

/// A program built with `AddressSanitizer` insists on being first, before any preloaded library, and says how to let it be.
#[test]
#[ignore = "needs the built library"]
fn programs_with_address_sanitizer_start_by_their_documented_way_out() {
    let folder = scratch();
    let hello = folder.path().join("hello");
    compile("gcc", &[&program("hello.c")], &hello, &["-fsanitize=address"]);
    let refused = run(&mut preloaded(&hello));
    assert!(refused.stderr.contains("ASan runtime does not come first"), "{refused:#?}");
    let with = run(preloaded(&hello).env("ASAN_OPTIONS", "verify_asan_link_order=0"));
    assert_eq!(
        (with.code, with.stdout.as_str(), with.stderr.as_str()),
        (Some(7), "hello from hello 1\n", "")
    );
    for (kind, sanitizer) in [("undefined", "-fsanitize=undefined"), ("thread", "-fsanitize=thread")] {
        let hello = folder.path().join(kind);
        compile("gcc", &[&program("hello.c")], &hello, &[sanitizer]);
        let (without, with) = (run(&mut plain(&hello)), run(&mut preloaded(&hello)));
        assert_eq!(
            (with.code, with.stdout, with.stderr),
            (without.code, without.stdout, without.stderr),
            "{kind}"
        );
    }
}

/// Names of functions that a library exports, `step` apart.
fn exported(file: &Path, step: usize) -> Vec<String> {
    let bytes = std::fs::read(file).unwrap();
    let image = object::File::parse(bytes.as_slice()).unwrap();
    let mut names: Vec<String> = image
        .dynamic_symbols()
        .filter(ObjectSymbol::is_definition)
        .filter_map(|symbol| symbol.name().map(str::to_owned).ok())
        .filter(|name| !name.starts_with("GLIBC") && name.len() < 90)
        // These four the library does stand in for.
        .filter(|name| !matches!(name.as_str(), "dlsym" | "dlvsym" | "dlopen" | "dlmopen"))
        .collect();
    names.sort();
    names.dedup();
    names.into_iter().step_by(step).collect()
}

fn library_of_gcc(name: &str) -> PathBuf {
    let output = common::output(Command::new("gcc").arg(format!("-print-file-name={name}")));
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
}

// HK-05
#[test]
#[ignore = "needs the built library"]
fn every_other_name_is_found_as_without_the_library() {
    let folder = scratch();
    let libgomp = library_of_gcc("libgomp.so.1");
    let names =
        build(&folder, "names", &["-pthread", "-lm", "-Wl,--no-as-needed", libgomp.to_str().unwrap()]);
    let later = build(&folder, "later.so", &["-shared", "-fPIC", "-fno-builtin"]);
    let mut wanted = exported(&library_of_gcc("libc.so.6"), 6);
    wanted.extend(exported(&library_of_gcc("libm.so.6"), 12));
    wanted.extend(exported(&libgomp, 4));
    wanted.extend(
        [
            "abs",
            "no_such_function",
            "cudaMalloc",
            "cublasCreate_v2",
            "cufftPlan1d",
            "nvtxMarkA",
            "curl_easy_init",
            "dlerror",
            "dlclose",
            "dladdr",
            "dlinfo",
            "later_next",
            "cu",
            "nvml",
            "main",
        ]
        .map(str::to_owned),
    );
    assert!(wanted.len() >= 500 && wanted.len() < 1024, "{}", wanted.len());
    let list = folder.path().join("list");
    std::fs::write(&list, wanted.join("\n")).unwrap();
    let ask = |command: &mut Command| {
        // `run` closes stdin, so the list goes through a shell.
        let inner = format!("exec \"$0\" \"$1\" < {}", list.display());
        let mut shell = Command::new("/bin/sh");
        shell.env_clear().env("LC_ALL", "C").args(["-c", &inner]).arg(&names).arg(&later);
        for (key, value) in command.get_envs() {
            if let Some(value) = value {
                shell.env(key, value);
            }
        }
        run(&mut shell).quiet()
    };
    let without = ask(&mut plain(&names));
    assert!(without.lines().count() > 500 * 11, "{}", without.lines().count());
    for (case, preload) in [
        ("alone", format!("{}", library().display())),
        ("before another", format!("{}:{}", library().display(), later.display())),
    ] {
        // The other preloaded library changes what is found, so it is there in both runs.
        let without = match case {
            "alone" => without.clone(),
            _ => ask(plain(&names).env("LD_PRELOAD", &later)),
        };
        let with = ask(plain(&names).env("LD_PRELOAD", preload));
        let differs: Vec<_> = without.lines().zip(with.lines()).filter(|(a, b)| a != b).take(10).collect();
        assert!(differs.is_empty() && without.len() == with.len(), "{case}: {differs:#?}");
    }
}

/// Another library that stands in for `dlsym` calls the next one: neither order may go round in circles.
#[test]
#[ignore = "needs the built library"]
fn another_interposer_of_dlsym_gets_on_with_it() {
    let folder = scratch();
    let other = build(&folder, "interposer", &["-shared", "-fPIC"]);
    let absent = build(&folder, "absent", &[]);
    let without = run(&mut plain(&absent)).quiet();
    for (case, preload) in [
        ("before", format!("{}:{}", other.display(), library().display())),
        ("behind", format!("{}:{}", library().display(), other.display())),
    ] {
        let with = run(plain(&absent).env("LD_PRELOAD", preload)).quiet();
        assert_eq!(with.lines().last(), without.lines().last(), "{case}");
    }
}

/// In a container without a driver nothing that the library exports is found by a program that looks for a driver.
#[test]
#[ignore = "needs the built library"]
fn without_a_driver_there_is_none() {
    let folder = scratch();
    let absent = build(&folder, "absent", &[]);
    let without = run(&mut plain(&absent)).quiet();
    let with = run(&mut preloaded(&absent)).quiet();
    assert_eq!(with, without);
    assert!(with.contains("no cuda:") && !with.contains(" found"), "{with}");
}

/// One answer of `probe.c`.
type Answers = BTreeMap<(String, String, u32, u64), (String, String)>;

struct Probe {
    text: String,
    answers: Answers,
}

/// What a program is told about every function, by all ways there are, over a driver that exports them all.
fn probe(folder: &Path, compiler: &str, start: impl Fn(&Path) -> Command) -> Probe {
    let driver = stub::build(folder, compiler);
    let forms = stub::forms();
    let mut tables = String::from(
        "struct linked { const char *name; void *address; };\nstruct triple { const char *name; int version; unsigned long flags; };\n",
    );
    let mut symbols: Vec<&str> = forms.iter().map(|form| form.symbol).collect();
    symbols.extend(stub::NVML);
    symbols.sort_unstable();
    for symbol in &symbols {
        writeln!(tables, "extern int {symbol}(void);").unwrap();
    }
    tables += "const struct linked linked[] = {\n";
    for symbol in &symbols {
        writeln!(tables, "{{\"{symbol}\", (void *){symbol}}},").unwrap();
    }
    writeln!(tables, "}};\nconst int linked_count = {};\nconst struct triple triples[] = {{", symbols.len())
        .unwrap();
    let mut triples = 0;
    for (base, version, flags) in triples_of(&forms) {
        writeln!(tables, "{{\"{base}\", {version}, {flags}}},").unwrap();
        triples += 1;
    }
    writeln!(tables, "}};\nconst int triple_count = {triples};").unwrap();
    let source = folder.join("tables.c");
    std::fs::write(&source, tables).unwrap();
    let into = folder.join("probe");
    let (cuda, nvml) = (driver.join("libcuda.so.1"), driver.join("libnvidia-ml.so.1"));
    compile(
        compiler,
        &[&program("probe.c"), &source, &cuda, &nvml],
        &into,
        &["-fPIE", "-pie", "-Wl,--no-as-needed"],
    );
    let text = run(start(&into).env("LD_LIBRARY_PATH", folder)).quiet();
    let mut answers = Answers::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        if let [way, name, version, flags, symbol, image] = words[..]
            && way != "status"
        {
            let key = (way.to_owned(), name.to_owned(), version.parse().unwrap(), flags.parse().unwrap());
            answers.insert(key, (symbol.to_owned(), image.to_owned()));
        }
    }
    Probe { text, answers }
}

/// Every name at every version that has a form of it, between them, and past the newest; in all flavours.
fn triples_of(forms: &[stub::Form]) -> Vec<(&'static str, u32, u64)> {
    let mut triples = Vec::new();
    for form in forms {
        for version in [form.since.max(2000), form.since.max(2000) - 10, 11030, 12000, 12090, 13000, 13050] {
            for flags in [0, 1, 2] {
                triples.push((form.base, version, flags));
            }
        }
    }
    triples.sort_unstable();
    triples.dedup();
    triples
}

fn check_probe(probe: &Probe) {
    let forms = stub::forms();
    let hooked: Vec<&str> = vgpu::exported_names().collect();
    let image = |symbol: &str| match symbol {
        _ if hooked.contains(&symbol) => "libvgpu.so",
        _ if symbol.starts_with("nvml") => "libnvidia-ml.so.1",
        _ => "libcuda.so.1",
    };
    let mut ways: BTreeMap<&str, usize> = BTreeMap::new();
    for ((way, name, version, flags), (symbol, found_in)) in &probe.answers {
        *ways.entry(way).or_default() += 1;
        let want = match way.as_str() {
            "v1" | "v2" => stub::expected(&forms, name, *version, *flags == 2),
            // The driver has no other function of these names behind it.
            _ => Some(name.as_str()),
        };
        match want {
            Some(want) => assert_eq!(
                (symbol.as_str(), found_in.as_str()),
                (want, image(want)),
                "{way} {name} version {version} flags {flags}"
            ),
            None => assert_eq!(symbol, "nothing", "{way} {name} version {version} flags {flags}"),
        }
    }
    assert_eq!(
        ways.keys().copied().collect::<Vec<_>>(),
        ["all", "default", "handle", "link", "next", "v1", "v2"]
    );
    assert!(ways.values().all(|&count| count >= forms.len()), "{ways:?}");
    assert!(probe.text.ends_with("init 0\nnvml 0\n"), "{}", probe.text.lines().last().unwrap_or_default());
}

// HK-03: every symbol by every way, over a driver whose start calls back into exported symbols.
#[test]
#[ignore = "needs the built library"]
fn every_function_is_reached_in_every_way_with_its_own_form() {
    let folder = scratch();
    let with = probe(folder.path(), "gcc", preloaded);
    check_probe(&with);
    // Status and result are the driver's own.
    let without = run(plain(&folder.path().join("probe")).env("LD_LIBRARY_PATH", folder.path())).quiet();
    let statuses = |text: &str| {
        text.lines().filter(|line| line.starts_with("status")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert!(statuses(&without).len() > 5000);
    assert_eq!(statuses(&with.text), statuses(&without));
    // All of it, some 20,000 look-ups, within the second that the report gives to one.
    let start = std::time::Instant::now();
    run(preloaded(&folder.path().join("probe")).env("LD_LIBRARY_PATH", folder.path())).quiet();
    assert!(start.elapsed() < std::time::Duration::from_secs(1), "{:?}", start.elapsed());
}

/// A form of the future, at an address that nothing explains, is the driver's where nothing is limited.
#[test]
#[ignore = "needs the built library"]
fn unknown_forms_are_passed_on_where_nothing_is_limited() {
    let folder = scratch();
    stub::build(folder.path(), "gcc");
    let future = build(&folder, "future", &[]);
    let run_it = |command: &mut Command| run(command.env("LD_LIBRARY_PATH", folder.path())).quiet();
    let without = run_it(&mut plain(&future));
    assert_eq!(without, "result 0 status 0 found\n");
    assert_eq!(run_it(&mut preloaded(&future)), without);
    // One that nobody could hold to a limit is not given out where there is one.
    let limited = run_it(
        preloaded(&future)
            .env("CUDA_DEVICE_MEMORY_LIMIT", "1g")
            .env("CUDA_DEVICE_MEMORY_SHARED_CACHE", folder.path().join("usage.cache")),
    );
    assert_eq!(limited, "result 0 status 2 nothing\n");
}

/// Binding a library to its own needs first is how a library escapes; where there is a limit it is not heeded.
#[test]
#[ignore = "needs the built library"]
fn deep_binding_does_not_escape_a_limit() {
    let folder = scratch();
    stub::build(folder.path(), "gcc");
    let cuda = folder.path().join("libcuda.so.1");
    build(&folder, "deep.so", &["-shared", "-fPIC", "-Wl,--no-as-needed", cuda.to_str().unwrap()]);
    let bound = build(&folder, "deepbind", &[]);
    let run_it = |command: &mut Command| run(command.env("LD_LIBRARY_PATH", folder.path())).quiet();
    assert_eq!(run_it(&mut plain(&bound)), "libcuda.so.1\n");
    assert_eq!(run_it(&mut preloaded(&bound)), "libcuda.so.1\n");
    let limited = run_it(
        preloaded(&bound)
            .env("CUDA_DEVICE_MEMORY_LIMIT", "1g")
            .env("CUDA_DEVICE_MEMORY_SHARED_CACHE", folder.path().join("usage.cache")),
    );
    assert_eq!(limited, "libvgpu.so\n");
}

/// The loader looks at the caller: a library finds what lies in its own folder as without this library in between.
#[test]
#[ignore = "needs the built library"]
fn a_library_opens_what_lies_beside_it() {
    let folder = scratch();
    std::fs::create_dir(folder.path().join("inner")).unwrap();
    compile("gcc", &[&program("later.c")], &folder.path().join("inner/beside.so"), &["-shared", "-fPIC"]);
    let opens = build(&folder, "opens.so", &["-shared", "-fPIC", "-Wl,-rpath,$ORIGIN/inner"]);
    let opener = build(&folder, "opener", &[]);
    for limit in [None, Some("1g")] {
        let mut command = preloaded(&opener);
        command.arg(&opens);
        if let Some(limit) = limit {
            command.env("CUDA_DEVICE_MEMORY_LIMIT", limit);
        }
        assert_eq!(run(&mut command).quiet(), run(plain(&opener).arg(&opens)).quiet());
    }
}

#[test]
#[ignore = "needs the built library"]
fn the_process_is_left_as_it_is() {
    let folder = scratch();
    stub::build(folder.path(), "gcc");
    let hygiene = build(&folder, "hygiene", &[]);
    let text = run(preloaded(&hygiene).env("LD_LIBRARY_PATH", folder.path())).quiet();
    unchanged(&text);
    assert!(text.ends_with("errno 77 77\nresult 0\n"), "{text}");
}

fn unchanged(text: &str) {
    let state = |when: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(when))
            .unwrap_or_else(|| panic!("no {when}: {text}"))
            .to_owned()
    };
    assert_eq!(state("before "), state("after "));
}

/// aarch64 under emulation: programs start, and every function is reached in every way.
#[test]
#[ignore = "needs the built library"]
fn aarch64_starts_and_resolves() {
    if std::env::var_os("MULLION_HOOK_WITHOUT_AARCH64").is_some() {
        eprintln!("the library for aarch64 was not built: not tested");
        return;
    }
    let library = library_for("aarch64");
    assert!(library.exists(), "no {}", library.display());
    let emulated = |program: &Path| {
        let mut command = Command::new("qemu-aarch64");
        command.env_clear().args(["-L", "/usr/aarch64-linux-gnu", "-E"]);
        command.arg(format!("LD_PRELOAD={}", library.display())).arg(program);
        command
    };
    let folder = scratch();
    let hello = folder.path().join("hello");
    compile("aarch64-linux-gnu-gcc", &[&program("hello.c")], &hello, &[]);
    let with = run(&mut emulated(&hello));
    assert_eq!(
        (with.code, with.stdout.as_str(), with.stderr.as_str()),
        (Some(7), "hello from hello 1\n", "")
    );
    check_probe(&probe(folder.path(), "aarch64-linux-gnu-gcc", emulated));
}
