//! Loaded ELF images and their symbols, read as the loader mapped them.

use core::ffi::{CStr, c_void};
use core::ptr::with_exposed_provenance;

use crate::sys::{self, Loaded};

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_PHDR: u32 = 6;
const DT_NULL: usize = 0;
const DT_HASH: usize = 4;
const DT_STRTAB: usize = 5;
const DT_SYMTAB: usize = 6;
const DT_SONAME: usize = 14;
const DT_DEBUG: usize = 21;
const DT_GNU_HASH: usize = 0x6fff_fef5;
const DT_VERSYM: usize = 0x6fff_fff0;
const STT_NOTYPE: u8 = 0;
const STT_FUNC: u8 = 2;
const STT_GNU_IFUNC: u8 = 10;
/// Top bit of a symbol's version: not the default one of its name.
const HIDDEN: u16 = 0x8000;

#[repr(C)]
struct Header {
    kind: u32,
    flags: u32,
    offset: usize,
    address: usize,
    physical: usize,
    file_size: usize,
    memory_size: usize,
    align: usize,
}

#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: usize,
}

/// A loaded image with a symbol table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Image {
    /// What is added to the addresses of the file.
    pub(crate) base: usize,
    /// The path it was loaded from, as the loader keeps it; empty for the program itself.
    pub(crate) path: &'static CStr,
    /// Lowest and highest mapped address.
    range: (usize, usize),
    strings: usize,
    symbols: usize,
    gnu_hash: usize,
    hash: usize,
    versions: usize,
    soname: usize,
}

/// Reads a value of a mapped table.
///
/// # Safety
/// `at` is inside a mapped table of an image and aligned for `T`.
unsafe fn read<T: Copy>(at: usize) -> T {
    // SAFETY: as the caller says.
    unsafe { with_exposed_provenance::<T>(at).read() }
}

/// The string at `at`.
///
/// # Safety
/// `at` is inside the string table of an image, which stays mapped.
unsafe fn string(at: usize) -> &'static CStr {
    // SAFETY: as the caller says; string tables end with a NUL.
    unsafe { CStr::from_ptr(with_exposed_provenance(at)) }
}

impl Image {
    /// Reads what the loader says about an image; `None` when it has no symbols to look up.
    fn new(loaded: &Loaded) -> Option<Self> {
        let mut dynamic = 0;
        let mut range = (usize::MAX, 0);
        for header in headers(loaded) {
            let start = loaded.base.wrapping_add(header.address);
            match header.kind {
                PT_LOAD => range = (range.0.min(start), range.1.max(start.wrapping_add(header.memory_size))),
                PT_DYNAMIC => dynamic = start,
                _ => {}
            }
        }
        if dynamic == 0 {
            return None;
        }
        let path = if loaded.name.is_null() {
            c""
        } else {
            // SAFETY: the loader's name of a loaded image is NUL-terminated, and ours stays loaded while it is used.
            unsafe { CStr::from_ptr(loaded.name) }
        };
        Self::from_dynamic(loaded.base, path, range, dynamic)
    }

    /// Reads the dynamic section at `dynamic`.
    fn from_dynamic(base: usize, path: &'static CStr, range: (usize, usize), dynamic: usize) -> Option<Self> {
        let mut image = Self {
            base,
            path,
            range,
            strings: 0,
            symbols: 0,
            gnu_hash: 0,
            hash: 0,
            versions: 0,
            soname: usize::MAX,
        };
        each_entry(dynamic, &mut |tag, value| match tag {
            DT_HASH => image.hash = image.place(value),
            DT_STRTAB => image.strings = image.place(value),
            DT_SYMTAB => image.symbols = image.place(value),
            DT_GNU_HASH => image.gnu_hash = image.place(value),
            DT_VERSYM => image.versions = image.place(value),
            DT_SONAME => image.soname = value,
            _ => {}
        });
        (image.strings != 0 && image.symbols != 0 && (image.gnu_hash != 0 || image.hash != 0))
            .then_some(image)
    }

    /// An address of the dynamic section: glibc has relocated most of them in place, musl and the vDSO have not.
    fn place(&self, value: usize) -> usize {
        if (self.range.0..self.range.1).contains(&value) { value } else { self.base.wrapping_add(value) }
    }

    /// Whether `address` lies in the image.
    pub(crate) fn contains(&self, address: usize) -> bool {
        (self.range.0..self.range.1).contains(&address)
    }

    /// Whether the library's own name, or that of its file, begins with `name`.
    pub(crate) fn is_called(&self, name: &[u8]) -> bool {
        let file = self.path.to_bytes().rsplit(|&byte| byte == b'/').next().unwrap_or_default();
        // SAFETY: an offset into the string table of a loaded image.
        let soname = || unsafe { string(self.strings.wrapping_add(self.soname)) }.to_bytes();
        file.starts_with(name) || (self.soname != usize::MAX && soname().starts_with(name))
    }

    /// The address of the function `name`: its default version, or any when there is no default.
    pub(crate) fn function(&self, name: &[u8]) -> Option<usize> {
        let mut found = None;
        self.each_candidate(name, &mut |index| {
            // SAFETY: `index` comes from the hash table, so it lies inside the symbol table.
            let symbol: &Symbol = unsafe {
                &*with_exposed_provenance::<Symbol>(
                    self.symbols.wrapping_add(index as usize * size_of::<Symbol>()),
                )
            };
            let kind = symbol.info & 0xf;
            if symbol.section == 0 || !matches!(kind, STT_NOTYPE | STT_FUNC | STT_GNU_IFUNC) {
                return false;
            }
            // SAFETY: a symbol's name is an offset into the string table.
            if unsafe { string(self.strings.wrapping_add(symbol.name as usize)) }.to_bytes() != name {
                return false;
            }
            found = Some((kind, self.base.wrapping_add(symbol.value)));
            self.versions == 0 || {
                // SAFETY: the version table has an entry for each symbol.
                let version: u16 = unsafe { read(self.versions.wrapping_add(index as usize * 2)) };
                version & HIDDEN == 0
            }
        });
        let (kind, address) = found?;
        if kind != STT_GNU_IFUNC {
            return Some(address);
        }
        // SAFETY: an indirect function's symbol is a function that returns the address to use.
        let resolve = unsafe { core::mem::transmute::<usize, extern "C" fn() -> usize>(address) };
        Some(resolve())
    }

    /// Shows the index of each symbol that may be `name`, until `see` returns true.
    fn each_candidate(&self, name: &[u8], see: &mut dyn FnMut(u32) -> bool) {
        if self.gnu_hash != 0 {
            // SAFETY: the table is this image's.
            unsafe { gnu_candidates(self.gnu_hash, name, see) }
        } else {
            // SAFETY: the table is this image's.
            unsafe { sysv_candidates(self.hash, name, see) }
        }
    }
}

/// Shows tag and value of each entry of the dynamic section at `at`.
fn each_entry(mut at: usize, see: &mut dyn FnMut(usize, usize)) {
    loop {
        // SAFETY: the dynamic section is an array of pairs that ends with DT_NULL.
        let (tag, value): (usize, usize) = unsafe { read(at) };
        if tag == DT_NULL {
            return;
        }
        see(tag, value);
        at = at.wrapping_add(2 * size_of::<usize>());
    }
}

fn headers(loaded: &Loaded) -> &[Header] {
    if loaded.headers.is_null() {
        return &[];
    }
    // SAFETY: the loader says how many program headers there are, and they are mapped.
    unsafe { core::slice::from_raw_parts(loaded.headers.cast::<Header>(), usize::from(loaded.header_count)) }
}

/// Walks a `DT_GNU_HASH` table: four words, a Bloom filter, buckets, chains.
///
/// # Safety
/// `table` is the table of a loaded image.
unsafe fn gnu_candidates(table: usize, name: &[u8], see: &mut dyn FnMut(u32) -> bool) {
    let hash = name.iter().fold(5381_u32, |hash, &byte| hash.wrapping_mul(33).wrapping_add(u32::from(byte)));
    // SAFETY: the four words of the table's head.
    let [buckets, first, bloom_size, bloom_shift]: [u32; 4] = unsafe { read(table) };
    if buckets == 0 || bloom_size == 0 {
        return;
    }
    let bloom = table.wrapping_add(16);
    let word_at = (hash / usize::BITS % bloom_size) as usize * size_of::<usize>();
    // SAFETY: the filter has `bloom_size` words.
    let word: usize = unsafe { read(bloom.wrapping_add(word_at)) };
    let second = hash.checked_shr(bloom_shift).unwrap_or(0);
    if (word >> (hash % usize::BITS)) & (word >> (second % usize::BITS)) & 1 == 0 {
        return;
    }
    let bucket_table = bloom.wrapping_add(bloom_size as usize * size_of::<usize>());
    // SAFETY: there are `buckets` buckets.
    let mut index: u32 = unsafe { read(bucket_table.wrapping_add((hash % buckets) as usize * 4)) };
    if index < first {
        return;
    }
    let chains = bucket_table.wrapping_add(buckets as usize * 4);
    loop {
        // SAFETY: a chain has a word for each symbol and ends with an odd one.
        let link: u32 = unsafe { read(chains.wrapping_add((index - first) as usize * 4)) };
        if link | 1 == hash | 1 && see(index) || link & 1 == 1 {
            return;
        }
        index += 1;
    }
}

/// Walks a `DT_HASH` table: number of buckets, number of symbols, buckets, chains.
///
/// # Safety
/// `table` is the table of a loaded image.
unsafe fn sysv_candidates(table: usize, name: &[u8], see: &mut dyn FnMut(u32) -> bool) {
    let hash = name.iter().fold(0_u32, |hash, &byte| {
        let hash = hash.wrapping_shl(4).wrapping_add(u32::from(byte));
        let high = hash & 0xf000_0000;
        (hash ^ (high >> 24)) & !high
    });
    // SAFETY: the two words of the table's head.
    let [buckets, symbols]: [u32; 2] = unsafe { read(table) };
    if buckets == 0 {
        return;
    }
    // SAFETY: there are `buckets` buckets.
    let mut index: u32 = unsafe { read(table.wrapping_add(8 + (hash % buckets) as usize * 4)) };
    while index != 0 && index < symbols {
        if see(index) {
            return;
        }
        // SAFETY: there is a link for each symbol.
        index = unsafe { read(table.wrapping_add(8 + (buckets as usize + index as usize) * 4)) };
    }
}

/// `struct r_debug`, by which a debugger finds the loaded images.
#[repr(C)]
#[derive(Clone, Copy)]
struct Debug {
    version: i32,
    first: usize,
}

/// `struct link_map`: one loaded image, and where the next is.
#[repr(C)]
#[derive(Clone, Copy)]
struct Link {
    base: usize,
    name: usize,
    dynamic: usize,
    next: usize,
}

/// The function `name` of the C library, found without calling any: through the list of images that the program's
/// dynamic section tells a debugger of. The C library and what comes before it in that list is there from the start to
/// the end, so the list can be walked that far without the loader's lock.
pub(crate) fn of_the_c_library(name: &[u8]) -> Option<usize> {
    const AT_PHDR: core::ffi::c_ulong = 3;
    const AT_PHNUM: core::ffi::c_ulong = 5;
    let first = sys::auxiliary(AT_PHDR);
    let program = Loaded {
        base: 0,
        name: core::ptr::null(),
        headers: with_exposed_provenance(first),
        header_count: u16::try_from(sys::auxiliary(AT_PHNUM)).ok()?,
    };
    let find =
        |kind| headers(&program).iter().find(|header| header.kind == kind).map(|header| header.address);
    let base = find(PT_PHDR).map_or(0, |address| first.wrapping_sub(address));
    let mut debug = 0;
    each_entry(base.wrapping_add(find(PT_DYNAMIC)?), &mut |tag, value| {
        if tag == DT_DEBUG {
            debug = value;
        }
    });
    if debug == 0 {
        return None;
    }
    // SAFETY: the loader has put the address of its structure there.
    let mut at = unsafe { read::<Debug>(debug) }.first;
    while at != 0 {
        // SAFETY: the loader's list of images.
        let link: Link = unsafe { read(at) };
        // Addresses in the dynamic section are the loader's own, relocated, when they lie behind the base.
        let range = (link.base, usize::MAX);
        let image = Image::from_dynamic(link.base, c"", range, link.dynamic).filter(|image| {
            image.is_called(b"libc.so") || image.is_called(b"libc.musl") || image.is_called(b"ld-musl")
        });
        if let Some(image) = image {
            return image.function(name);
        }
        at = link.next;
    }
    None
}

/// The first loaded image for which `is` holds.
pub(crate) fn find(mut is: impl FnMut(&Image) -> bool) -> Option<Image> {
    let mut found = None;
    sys::each_image(|loaded| {
        found = Image::new(loaded).filter(&mut is);
        found.is_some()
    });
    found
}

/// The image that `address` lies in.
pub(crate) fn containing(address: usize) -> Option<Image> {
    find(|image| image.contains(address))
}

/// An address in this library.
pub(crate) fn here() -> usize {
    (here as fn() -> usize as *const c_void).expose_provenance()
}

/// The function `name` of the first image behind this library in the search order, or of the first other one when there
/// is none behind (when the library was opened, not preloaded).
pub(crate) fn next_function(name: &CStr) -> Option<usize> {
    let (mut before, mut behind, mut passed) = (None, None, false);
    sys::each_image(|loaded| {
        let Some(image) = Image::new(loaded) else { return false };
        if image.contains(here()) {
            passed = true;
            return false;
        }
        if passed || before.is_none() {
            let found = image.function(name.to_bytes());
            *if passed { &mut behind } else { &mut before } = found;
        }
        behind.is_some()
    });
    behind.or(before)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;

    unsafe extern "C" {
        fn dlsym(handle: *mut c_void, name: *const core::ffi::c_char) -> *mut c_void;
    }

    #[test]
    fn finds_what_the_loader_finds() {
        for name in
            ["getenv", "dlopen", "dl_iterate_phdr", "pthread_create", "malloc", "qsort", "no_such_function"]
        {
            let c_name = CString::new(name).unwrap();
            // SAFETY: a search in all images.
            let want = unsafe { dlsym(core::ptr::null_mut(), c_name.as_ptr()) } as usize;
            assert_eq!(next_function(&c_name).unwrap_or(0), want, "{name}");
        }
    }

    #[test]
    fn finds_the_c_library_without_it() {
        let libc = find(|image| image.is_called(b"libc.so")).unwrap();
        for name in [b"dl_iterate_phdr".as_slice(), b"getenv", b"no_such_function"] {
            assert_eq!(of_the_c_library(name), libc.function(name));
        }
    }

    #[test]
    fn both_kinds_of_hash_tables_find_the_same() {
        let vdso = find(|image| image.is_called(b"linux-vdso")).unwrap();
        for table in [Image { hash: 0, ..vdso }, Image { gnu_hash: 0, ..vdso }] {
            if table.hash != 0 || table.gnu_hash != 0 {
                let found = table.function(b"__vdso_clock_gettime").unwrap();
                assert!(vdso.contains(found));
                assert_eq!(table.function(b"__vdso_no_such"), None);
            }
        }
    }

    #[test]
    fn knows_where_it_is() {
        let own = containing(here()).unwrap();
        let libc = find(|image| image.is_called(b"libc.so")).unwrap();
        assert!(!libc.contains(here()) && !own.contains(libc.function(b"getenv").unwrap()));
    }
}
