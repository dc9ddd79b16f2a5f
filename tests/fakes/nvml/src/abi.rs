//! The C side of arguments: where pointers are read and written, and nowhere else.
#![expect(unsafe_code, reason = "reads and writes through pointers that the C interface hands over")]

use std::ffi::{CStr, c_char, c_uint};

use crate::code::Code;

/// A pointer argument that the callee writes through, reads, or both; null where the caller says so.
///
/// Only the C interface makes one, and its contract is: null, or valid for as many elements as the
/// caller announces (one, where there is no count). What can be checked, null and alignment, is checked.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    /// A pointer out of a struct of the interface, whose contract is the same.
    pub(crate) fn from_pointer(pointer: *mut T) -> Self {
        Self(pointer)
    }

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    fn checked(self) -> Result<*mut T, Code> {
        let usable = !self.0.is_null() && self.0.is_aligned();
        usable.then_some(self.0).ok_or(Code::INVALID_ARGUMENT)
    }

    /// Writes the argument.
    pub(crate) fn put(self, value: T) -> Result<(), Code> {
        let target = self.checked()?;
        // SAFETY: not null, aligned, and by the interface's contract valid for one element.
        unsafe { target.write(value) };
        Ok(())
    }

    /// Reads an argument that goes in and out.
    pub(crate) fn get(self) -> Result<T, Code> {
        let source = self.checked()?;
        // SAFETY: not null, aligned, and by the interface's contract an initialised element.
        Ok(unsafe { source.read() })
    }

    /// Writes an array whose room the caller of this function has checked against `values`.
    pub(crate) fn fill(self, values: &[T]) -> Result<(), Code> {
        if values.is_empty() {
            return Ok(());
        }
        let target = self.checked()?;
        // SAFETY: not null, aligned, valid for the announced count, which `values` does not exceed; what
        // the program hands over never overlaps memory of this library.
        unsafe { target.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        Ok(())
    }

    /// The same place seen as another struct; versioned structs tell which one it is.
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }
}

impl Out<c_char> {
    /// Writes a string into a buffer of `length` bytes, its end included.
    pub(crate) fn put_text(self, length: c_uint, text: &str) -> Result<(), Code> {
        let mut bytes: Vec<c_char> = text.bytes().map(|b| c_char::from_ne_bytes([b])).collect();
        bytes.push(0);
        if bytes.len() > length as usize {
            return Err(Code::INSUFFICIENT_SIZE);
        }
        self.fill(&bytes)
    }
}

/// A string argument.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// Its content; null and what is not UTF-8 are refused.
    pub(crate) fn read(self) -> Result<String, Code> {
        if self.0.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        // SAFETY: not null, and by the interface's contract a string that ends with a null byte.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map(str::to_owned).map_err(|_| Code::INVALID_ARGUMENT)
    }
}

/// Text in a fixed array of a struct, cut where it does not fit.
pub(crate) fn text_array<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    for (place, byte) in array.iter_mut().zip(text.bytes().take(N.saturating_sub(1))) {
        *place = c_char::from_ne_bytes([byte]);
    }
    array
}

/// `version` field of struct `T`: its size, and the version's number in the top byte.
pub(crate) fn version_of<T>(number: u32) -> c_uint {
    u32::try_from(size_of::<T>()).unwrap_or(0) | (number << 24)
}

/// Answers a list with a count that goes in and out: the count alone when there is no array, an error
/// with the count when there is too little room.
pub(crate) fn list<T: Copy>(
    array: Out<T>,
    count: Out<c_uint>,
    values: &[T],
    without_array: Result<(), Code>,
) -> Result<(), Code> {
    let room = count.get()?;
    count.put(length(values))?;
    if array.is_null() {
        return if values.is_empty() { Ok(()) } else { without_array };
    }
    if room < length(values) {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    array.fill(values)
}

/// A length as C sees it.
pub(crate) fn length<T>(values: &[T]) -> c_uint {
    c_uint::try_from(values.len()).unwrap_or(c_uint::MAX)
}
