//! What must hold of the built library so that every program of a container can load it.
#![cfg(test)]

mod common;

use std::collections::{BTreeMap, BTreeSet};

use object::elf;
use object::read::elf::{Dyn, ElfFile64, FileHeader, ProgramHeader, Rela, Sym};
use object::{Endianness, LittleEndian};

/// What the C library of the container is asked for, with the version under which glibc's `libc.so.6` for x86-64 has had
/// it (`GLIBC_2.17`, its first, for aarch64). All are in `libc.so.6` of 2.17 itself, since a program need not have loaded
/// `libdl`, `libpthread` or `librt`, and musl's libc has all of them:
///
/// * `clock_gettime` came from `librt` to `libc` with 2.17: the newest of all, and why nothing older will do. Where a
///   program has `librt` of 2.17 before `libc`, it gets the one there, which is the same.
/// * `getauxval` is of 2.16, and there was no other place for it.
/// * `dl_iterate_phdr`, `getenv` and `environ` were always there. `environ` is data: a program that has a copy of it
///   exports that, and the loader lets all have the same.
/// * `memcpy` has a second, older form (`GLIBC_2.2.5`), which is `memmove`. This library asks for no version, so the
///   loader takes that one; either will do.
/// * The others of `string.h` were always there, and the compiler calls them.
///
/// Functions of the loader (`dlsym` and the like) and `__register_atfork` are not asked for: they are looked up where
/// they happen to be.
const UNDEFINED: &[(&str, &str)] = &[
    ("bcmp", "GLIBC_2.2.5"),
    ("clock_gettime", "GLIBC_2.17"),
    ("dl_iterate_phdr", "GLIBC_2.2.5"),
    ("environ", "GLIBC_2.2.5"),
    ("getauxval", "GLIBC_2.16"),
    ("getenv", "GLIBC_2.2.5"),
    ("memcmp", "GLIBC_2.2.5"),
    ("memcpy", "GLIBC_2.14"),
    ("memmove", "GLIBC_2.2.5"),
    ("memset", "GLIBC_2.2.5"),
    ("strlen", "GLIBC_2.2.5"),
];

const ARCHITECTURES: [&str; 2] = ["x86_64", "aarch64"];

type Header = elf::FileHeader64<LittleEndian>;

struct Library {
    bytes: Vec<u8>,
    architecture: &'static str,
}

/// The libraries that were built: at least this machine's.
fn libraries() -> Vec<Library> {
    let found: Vec<Library> = ARCHITECTURES
        .into_iter()
        .filter_map(|architecture| {
            let bytes = std::fs::read(common::library_for(architecture)).ok()?;
            Some(Library { bytes, architecture })
        })
        .collect();
    assert!(found.iter().any(|library| library.architecture == std::env::consts::ARCH), "nothing was built");
    found
}

impl Library {
    fn header(&self) -> &Header {
        Header::parse(self.bytes.as_slice()).unwrap()
    }

    /// Tags and values of the dynamic section.
    fn dynamic(&self) -> Vec<(i64, u64)> {
        let segments = self.header().program_headers(LittleEndian, self.bytes.as_slice()).unwrap();
        segments
            .iter()
            .find_map(|segment| segment.dynamic(LittleEndian, self.bytes.as_slice()).unwrap())
            .expect("a dynamic section")
            .iter()
            .map(|entry| (entry.d_tag(LittleEndian), entry.d_val(LittleEndian)))
            .collect()
    }

    fn has(&self, tag: i64) -> bool {
        self.dynamic().iter().any(|&(found, _)| found == tag)
    }

    /// Names of the dynamic symbols, defined and undefined.
    fn symbols(&self) -> (BTreeSet<String>, BTreeSet<String>) {
        let sections = self.header().sections(LittleEndian, self.bytes.as_slice()).unwrap();
        let table = sections.symbols(LittleEndian, self.bytes.as_slice(), elf::SHT_DYNSYM).unwrap();
        let (mut defined, mut undefined) = (BTreeSet::new(), BTreeSet::new());
        for symbol in table.iter().skip(1) {
            let name = String::from_utf8(table.symbol_name(LittleEndian, symbol).unwrap().to_vec()).unwrap();
            if symbol.is_undefined(LittleEndian) {
                undefined.insert(name)
            } else {
                defined.insert(name)
            };
        }
        (defined, undefined)
    }
}

#[test]
#[ignore = "needs the built library"]
fn needs_no_other_library_and_no_symbol_version() {
    for library in libraries() {
        for (tag, what) in [
            (elf::DT_NEEDED, "a needed library"),
            (elf::DT_VERNEED, "needed symbol versions"),
            (elf::DT_VERSYM, "symbol versions"),
            (elf::DT_RPATH, "a search path"),
            (elf::DT_RUNPATH, "a search path"),
        ] {
            assert!(!library.has(tag), "{}: {what}", library.architecture);
        }
    }
}

#[test]
#[ignore = "needs the built library"]
fn asks_the_c_library_only_for_what_every_one_has() {
    let allowed: BTreeSet<&str> = UNDEFINED.iter().map(|&(name, _)| name).collect();
    for library in libraries() {
        let (_, undefined) = library.symbols();
        let others: Vec<_> = undefined.iter().filter(|name| !allowed.contains(name.as_str())).collect();
        assert!(others.is_empty(), "{}: {others:?}", library.architecture);
    }
}

/// What a symbol is called by default stays what it was when `libc.so.6` first had it: one that came from another library
/// later, as those of `libdl` and `libpthread` with 2.34, has the version of that day. So a newer glibc tells what an old
/// one had.
#[test]
#[cfg(target_env = "gnu")]
#[ignore = "needs the built library"]
fn glibc_has_had_it_all_since_2_17() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let own =
        maps.lines().find_map(|line| line.split_once('/').filter(|(_, path)| path.ends_with("/libc.so.6")));
    let own = format!("/{}", own.expect("libc.so.6 is loaded").1);
    let others = "/usr/aarch64-linux-gnu/lib/libc.so.6".to_owned();
    for (architecture, path) in [(std::env::consts::ARCH, own), ("aarch64", others)] {
        let Ok(bytes) = std::fs::read(&path) else { continue };
        let versions = default_versions(&bytes);
        for (name, of_x86_64) in UNDEFINED {
            let wanted = if architecture == "x86_64" { of_x86_64 } else { "GLIBC_2.17" };
            assert_eq!(versions.get(*name).map(String::as_str), Some(wanted), "{name} in {path}");
            let minor: u32 =
                wanted.trim_start_matches("GLIBC_2.").split('.').next().unwrap().parse().unwrap();
            assert!(minor <= 17, "{name} came with {wanted}");
        }
    }
}

/// The version under which a library gives each symbol to new programs.
fn default_versions(library: &[u8]) -> BTreeMap<String, String> {
    let header = Header::parse(library).unwrap();
    let sections = header.sections(LittleEndian, library).unwrap();
    let table = sections.symbols(LittleEndian, library, elf::SHT_DYNSYM).unwrap();
    let versions = sections.versions(LittleEndian, library).unwrap().expect("versions");
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let mut found = BTreeMap::new();
    for (index, symbol) in table.enumerate() {
        let version = versions.version_index(LittleEndian, index);
        if let Some(known) = versions.version(version).unwrap()
            && !symbol.is_undefined(LittleEndian)
            && !version.is_hidden()
        {
            found.insert(text(table.symbol_name(LittleEndian, symbol).unwrap()), text(known.name()));
        }
    }
    found
}

#[test]
#[ignore = "needs the built library"]
fn exports_the_table_and_nothing_else() {
    let table: BTreeSet<String> = vgpu::exported_names().map(str::to_owned).collect();
    for library in libraries() {
        let (exports, _) = library.symbols();
        assert_eq!(exports, table, "{}", library.architecture);
    }
}

#[test]
#[ignore = "needs the built library"]
fn runs_nothing_when_it_is_loaded() {
    for library in libraries() {
        for (tag, what) in [
            (elf::DT_INIT, "a constructor"),
            (elf::DT_INIT_ARRAY, "constructors"),
            (elf::DT_PREINIT_ARRAY, "constructors"),
            (elf::DT_FINI, "a destructor"),
            (elf::DT_FINI_ARRAY, "destructors"),
            (elf::DT_TEXTREL, "relocations in code"),
        ] {
            assert!(!library.has(tag), "{}: {what}", library.architecture);
        }
    }
}

#[test]
#[ignore = "needs the built library"]
fn segments_are_hard_to_misuse() {
    for library in libraries() {
        let architecture = library.architecture;
        let segments = library.header().program_headers(LittleEndian, library.bytes.as_slice()).unwrap();
        let kind = |kind: u32| segments.iter().filter(move |segment| segment.p_type(LittleEndian) == kind);
        assert_eq!(kind(elf::PT_TLS).count(), 0, "{architecture}: thread-local storage");
        assert_eq!(kind(elf::PT_GNU_RELRO).count(), 1, "{architecture}: RELRO");
        assert_eq!(kind(elf::PT_INTERP).count(), 0, "{architecture}: an interpreter");
        let stack = kind(elf::PT_GNU_STACK).next().expect("PT_GNU_STACK");
        assert_eq!(stack.p_flags(LittleEndian) & elf::PF_X, 0, "{architecture}: the stack is executable");
        for segment in kind(elf::PT_LOAD) {
            let flags = segment.p_flags(LittleEndian);
            assert_ne!(
                flags & (elf::PF_W | elf::PF_X),
                elf::PF_W | elf::PF_X,
                "{architecture}: code can be written"
            );
        }
        let flags =
            |tag: i64| library.dynamic().iter().find(|&&(found, _)| found == tag).map_or(0, |&(_, v)| v);
        assert_ne!(flags(elf::DT_FLAGS) & u64::from(elf::DF_BIND_NOW), 0, "{architecture}: BIND_NOW");
    }
}

/// The table holds this library's own wrappers, whatever else exports such a name: no address in it is left to the
/// loader to choose.
#[test]
#[ignore = "needs the built library"]
fn is_bound_to_its_own_functions() {
    for library in libraries() {
        let header = library.header();
        let sections = header.sections(LittleEndian, library.bytes.as_slice()).unwrap();
        let table = sections.symbols(LittleEndian, library.bytes.as_slice(), elf::SHT_DYNSYM).unwrap();
        let mut chosen = 0;
        for section in sections.iter() {
            let Some((relocations, _)) =
                object::read::elf::SectionHeader::rela(section, LittleEndian, library.bytes.as_slice())
                    .unwrap()
            else {
                continue;
            };
            for relocation in relocations {
                if let Some(index) = relocation.symbol(LittleEndian, false) {
                    let symbol = table.symbol(index).unwrap();
                    let name = table.symbol_name(LittleEndian, symbol).unwrap();
                    assert!(
                        symbol.is_undefined(LittleEndian),
                        "{}: {} is left to the loader",
                        library.architecture,
                        String::from_utf8_lossy(name)
                    );
                    chosen += 1;
                }
            }
        }
        assert!(chosen > 0, "{}: no relocation was seen", library.architecture);
    }
}

/// The line that a panic would leave on stderr is not there, because the compiler found no way to it.
#[test]
#[ignore = "needs the built library"]
fn no_panic_can_be_reached() {
    const LINE: &[u8] = b"a panic was reached";
    for library in libraries() {
        let found = library.bytes.windows(LINE.len()).any(|bytes| bytes == LINE);
        assert!(!found, "{}: find it with `objdump -dC`: calls of core::panicking", library.architecture);
    }
}

#[test]
#[ignore = "needs the built library"]
fn is_small_and_stripped() {
    for library in libraries() {
        let file = ElfFile64::<Endianness>::parse(library.bytes.as_slice()).unwrap();
        let sections = file.elf_section_table();
        let symbols = sections.symbols(file.endian(), library.bytes.as_slice(), elf::SHT_SYMTAB).unwrap();
        assert!(symbols.is_empty(), "{}: symbols are left", library.architecture);
        assert!(library.bytes.len() < 1 << 20, "{}: {} bytes", library.architecture, library.bytes.len());
    }
}
