//! `cuGetProcAddress`: the driver is asked first, then its answer is exchanged for the wrapper of the same form.
//!
//! One name has several forms, of which the program gets one by the CUDA version and the stream flavour that it asks
//! for; a wrapper of another form would take other arguments. So the form is known by the address that the driver
//! answers with: that of an exported symbol of the name, or what the driver answers for a form's own version and
//! flavour. Where that does not tell (two names may share one address, an address may match none), version and flavour
//! do. A name of the table with an address that nothing explains is a form that this library does not know: it is
//! counted, and refused where a limit is enforced.

#![expect(unsafe_code, reason = "calls the driver, and reads and writes the program's arguments")]

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr::{null_mut, without_provenance_mut};

use crate::container;
use crate::cuda::{CUenum, CUresult, CUuint64};
use crate::table::{self, Row};

/// `CU_GET_PROC_ADDRESS_LEGACY_STREAM`.
const LEGACY: CUuint64 = 1;
/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD: CUuint64 = 2;
/// `CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT`: there is such a function, but not for this version.
const VERSION_NOT_SUFFICIENT: CUenum = 2;
/// The newest CUDA version whose forms the table was compared with (13.5).
pub(crate) const NEWEST: u32 = 13050;

type V1 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, CUuint64) -> CUresult;
type V2 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, CUuint64, *mut CUenum) -> CUresult;

/// `cuGetProcAddress` of CUDA 11.3.
///
/// # Safety
/// As `cuGetProcAddress`.
pub(crate) unsafe fn v1(
    real: V1,
    name: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: CUuint64,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(name, function, version, flags) };
    if result.is_ok() {
        let ask = |name: &CStr, version, flags| {
            let mut found = null_mut();
            // SAFETY: a name and a place for the answer.
            let result = unsafe { real(name.as_ptr(), &raw mut found, version, flags) };
            if result.is_ok() { found.expose_provenance() } else { 0 }
        };
        // SAFETY: the driver has accepted name and place.
        if unsafe { exchange(name, function, version, flags, &ask) } == Answer::Refused {
            return CUresult::NOT_FOUND;
        }
    }
    result
}

/// `cuGetProcAddress` of CUDA 12.0, which also says why there is no function.
///
/// # Safety
/// As `cuGetProcAddress_v2`.
pub(crate) unsafe fn v2(
    real: V2,
    name: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: CUuint64,
    status: *mut CUenum,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(name, function, version, flags, status) };
    if result.is_ok() {
        let ask = |name: &CStr, version, flags| {
            let mut found = null_mut();
            // SAFETY: a name and a place for the answer; the status is optional.
            let result = unsafe { real(name.as_ptr(), &raw mut found, version, flags, null_mut()) };
            if result.is_ok() { found.expose_provenance() } else { 0 }
        };
        // SAFETY: the driver has accepted name and place.
        if unsafe { exchange(name, function, version, flags, &ask) } == Answer::Refused {
            if status.is_null() {
                return CUresult::NOT_FOUND;
            }
            // SAFETY: the driver has written there as well.
            unsafe { status.write(VERSION_NOT_SUFFICIENT) };
        }
    }
    result
}

/// `cuGetProcAddress_ptsz`: the flavour that is meant by default is the per-thread one.
///
/// # Safety
/// As `cuGetProcAddress`.
pub(crate) unsafe fn v1_per_thread(
    real: V1,
    name: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: CUuint64,
) -> CUresult {
    let flags = if flags == 0 { PER_THREAD } else { flags };
    // SAFETY: as the caller says.
    unsafe { v1(real, name, function, version, flags) }
}

/// `cuGetProcAddress_v2_ptsz`: the flavour that is meant by default is the per-thread one.
///
/// # Safety
/// As `cuGetProcAddress_v2`.
pub(crate) unsafe fn v2_per_thread(
    real: V2,
    name: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: CUuint64,
    status: *mut CUenum,
) -> CUresult {
    let flags = if flags == 0 { PER_THREAD } else { flags };
    // SAFETY: as the caller says.
    unsafe { v2(real, name, function, version, flags, status) }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// The driver's own, because the table has no such name or a limit is not enforced.
    Drivers,
    /// A wrapper.
    Wrapper,
    /// No function, because nothing would hold it to the limit.
    Refused,
}

/// Exchanges the driver's answer in `function` for a wrapper.
///
/// # Safety
/// `name` is a NUL-terminated string or null, `function` null or valid for reads and writes.
unsafe fn exchange(
    name: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: CUuint64,
    ask: &dyn Fn(&CStr, c_int, CUuint64) -> usize,
) -> Answer {
    if name.is_null() || function.is_null() {
        return Answer::Drivers;
    }
    // SAFETY: as the caller says.
    let name = unsafe { CStr::from_ptr(name) };
    // SAFETY: as the caller says.
    let given = unsafe { function.read() }.expose_provenance();
    if given == 0 || table::forms(name.to_bytes()).next().is_none() {
        return Answer::Drivers;
    }
    // A driver that looks its own functions up as a program does (NVIDIA's does not) has met the wrapper already.
    if table::rows().any(|row| row.wrapper.0.addr() == given) {
        return Answer::Wrapper;
    }
    let version = u32::try_from(version).unwrap_or(0);
    if let Some(row) = form(name.to_bytes(), given, version, flags, ask) {
        row.real.learn(given);
        // SAFETY: as the caller says.
        unsafe { function.write(row.wrapper.0.cast_mut()) };
        return Answer::Wrapper;
    }
    container::count_escape();
    if container::refuses() {
        // SAFETY: as the caller says.
        unsafe { function.write(without_provenance_mut(0)) };
        return Answer::Refused;
    }
    Answer::Drivers
}

/// The form of `name` that the driver's answer `given` is.
fn form(
    name: &[u8],
    given: usize,
    version: u32,
    flags: CUuint64,
    ask: &dyn Fn(&CStr, c_int, CUuint64) -> usize,
) -> Option<&'static Row> {
    let exported = |row: &Row| row.real.address() == Ok(given);
    if let found @ Some(_) = one_of(table::forms(name).filter(|row| exported(row)), version, flags) {
        return found;
    }
    // A version of one name may be another name's function: `cuGraphInstantiate` is `cuGraphInstantiateWithFlags`
    // since 12.0.
    let mut others = table::rows().filter(|row| exported(row));
    if let (Some(found), None) = (others.next(), others.next()) {
        return Some(found);
    }
    let answered = |row: &Row| {
        let flavour = if row.per_thread() { PER_THREAD } else { LEGACY };
        let mut base = [0_u8; 64];
        let text = row.base();
        let Some(place) = base.get_mut(..text.len()) else { return false };
        place.copy_from_slice(text);
        CStr::from_bytes_until_nul(&base)
            .is_ok_and(|base| ask(base, row.since.cast_signed(), flavour) == given)
    };
    if let found @ Some(_) = one_of(table::forms(name).filter(|row| answered(row)), version, flags) {
        return found;
    }
    if version > NEWEST { None } else { newest(table::forms(name), version, flags) }
}

/// The form among those that have the address: the only one, or the one that is meant.
fn one_of(
    mut forms: impl Iterator<Item = &'static Row> + Clone,
    version: u32,
    flags: CUuint64,
) -> Option<&'static Row> {
    let all = forms.clone();
    let first = forms.next()?;
    if forms.next().is_none() { Some(first) } else { newest(all, version, flags) }
}

/// Among forms of a name, the newest that a program asking for `version` and this flavour can be meant to get.
fn newest(
    forms: impl Iterator<Item = &'static Row> + Clone,
    version: u32,
    flags: CUuint64,
) -> Option<&'static Row> {
    let per_thread = flags & PER_THREAD != 0 && forms.clone().any(Row::per_thread);
    let mut fitting = forms.filter(|row| row.per_thread() == per_thread && row.since <= version);
    let first = fitting.next()?;
    Some(fitting.fold(first, |best, row| if row.since > best.since { row } else { best }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Addresses of nothing, one for each symbol.
    fn address(symbol: &str) -> usize {
        0x1000 + symbol.len() * 0x100 + usize::from(symbol.ends_with('z'))
    }

    fn found(
        given: usize,
        version: u32,
        flags: CUuint64,
        ask: &dyn Fn(&CStr, c_int, CUuint64) -> usize,
    ) -> &'static str {
        form(b"cuGetProcAddress", given, version, flags, ask).map_or("none", |row| row.symbol)
    }

    const NOTHING: fn(&CStr, c_int, CUuint64) -> usize = |_, _, _| 0;

    #[test]
    fn the_newest_fitting_form_is_meant() {
        for (version, flags, want) in [
            (11020, 0, None),
            (11030, 0, Some("cuGetProcAddress")),
            (11080, 1, Some("cuGetProcAddress")),
            (11080, 2, Some("cuGetProcAddress_ptsz")),
            (12000, 0, Some("cuGetProcAddress_v2")),
            (13050, 2, Some("cuGetProcAddress_v2_ptsz")),
        ] {
            let row = newest(table::forms(b"cuGetProcAddress"), version, flags);
            assert_eq!(row.map(|row| row.symbol), want, "{version} {flags}");
        }
        // A function of one flavour only is the same for all.
        assert_eq!(newest(table::forms(b"cuInit"), 12000, 2).map(|row| row.symbol), Some("cuInit"));
    }

    /// The driver is not loaded in this process, so no address is that of an exported symbol.
    #[test]
    fn an_address_that_matches_no_export_is_known_by_what_the_driver_answers() {
        let ask = |name: &CStr, version: c_int, flags: CUuint64| {
            assert_eq!(name, c"cuGetProcAddress");
            let symbol =
                newest(table::forms(name.to_bytes()), version.cast_unsigned(), flags).unwrap().symbol;
            address(symbol)
        };
        for symbol in
            ["cuGetProcAddress", "cuGetProcAddress_ptsz", "cuGetProcAddress_v2", "cuGetProcAddress_v2_ptsz"]
        {
            // Whatever is asked for: the address decides.
            for (version, flags) in [(11030, 0), (12000, 0), (14000, 2)] {
                assert_eq!(found(address(symbol), version, flags, &ask), symbol, "{version} {flags}");
            }
        }
    }

    #[test]
    fn stubs_folded_into_one_are_told_apart_by_version_and_flavour() {
        let one = |_: &CStr, _: c_int, _: CUuint64| 0x5000;
        for (version, flags, want) in [
            (11030, 0, "cuGetProcAddress"),
            (12000, 1, "cuGetProcAddress_v2"),
            (12000, 2, "cuGetProcAddress_v2_ptsz"),
        ] {
            assert_eq!(found(0x5000, version, flags, &one), want);
        }
    }

    #[test]
    fn an_address_that_nothing_explains_is_known_by_version_up_to_the_newest() {
        assert_eq!(found(0x6000, 12080, 0, &NOTHING), "cuGetProcAddress_v2");
        assert_eq!(found(0x6000, NEWEST, 2, &NOTHING), "cuGetProcAddress_v2_ptsz");
        assert_eq!(found(0x6000, NEWEST + 10, 0, &NOTHING), "none");
        assert_eq!(found(0x6000, 11000, 0, &NOTHING), "none");
    }

    #[test]
    fn a_version_can_be_another_names_function() {
        let Some(row) = table::find(b"cuGraphInstantiateWithFlags") else { panic!("no row") };
        row.real.pretend(0x7777);
        let found = form(b"cuGraphInstantiate", 0x7777, 12000, 0, &NOTHING);
        assert_eq!(found.map(|row| row.symbol), Some("cuGraphInstantiateWithFlags"));
    }
}
