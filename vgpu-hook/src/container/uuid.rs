//! Uuids of cards: text in the two files, 16 bytes from CUDA.

use crate::cuda::CUuuid;

/// The 16 bytes of `GPU-8f2b…` or `MIG-c6d4…`. `None` for any other writing, so also for `MIG-GPU-<uuid>/1/0` of drivers
/// before 470, whose CUDA cannot name such an instance by a uuid either.
pub(crate) fn parse(text: &[u8]) -> Option<CUuuid> {
    let digits = text.strip_prefix(b"GPU-").or_else(|| text.strip_prefix(b"MIG-"))?;
    let mut uuid = [0; 16];
    let mut nibbles = 0_usize;
    for (at, byte) in digits.iter().enumerate() {
        if matches!(at, 8 | 13 | 18 | 23) {
            if *byte != b'-' {
                return None;
            }
            continue;
        }
        let digit = u8::try_from(char::from(*byte).to_digit(16)?).ok()?;
        let place = uuid.get_mut(nibbles / 2)?;
        *place = *place << 4 | digit;
        nibbles += 1;
    }
    (nibbles == 32).then_some(CUuuid(uuid))
}

/// Length of a uuid's text.
pub(crate) const TEXT_LEN: usize = 40;

/// The text of a card's uuid as NVML writes it, with `GPU-` in front: CUDA does not say whether it is a MIG instance's.
pub(crate) fn text(uuid: CUuuid) -> [u8; TEXT_LEN] {
    let mut text = *b"GPU-________-____-____-____-____________";
    let nibbles = uuid.0.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    for (place, nibble) in text.iter_mut().filter(|place| **place == b'_').zip(nibbles) {
        *place = if nibble < 10 { b'0' + nibble } else { b'a' + nibble - 10 };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_32_digits_in_five_groups() {
        let bytes: [u8; 16] = core::array::from_fn(|i| u8::try_from(i * 17).unwrap());
        for (case, text, want) in [
            ("a card", "GPU-00112233-4455-6677-8899-aabbccddeeff", true),
            ("a MIG instance", "MIG-00112233-4455-6677-8899-aabbccddeeff", true),
            ("capitals", "GPU-00112233-4455-6677-8899-AABBCCDDEEFF", true),
            ("an old MIG instance", "MIG-GPU-00112233-4455-6677-8899-aabbccddeeff/1/0", false),
            ("no prefix", "00112233-4455-6677-8899-aabbccddeeff", false),
            ("one digit short", "GPU-00112233-4455-6677-8899-aabbccddeef", false),
            ("one digit more", "GPU-00112233-4455-6677-8899-aabbccddeeff0", false),
            ("no dashes", "GPU-00112233445566778899aabbccddeeff", false),
            ("empty", "", false),
        ] {
            assert_eq!(parse(text.as_bytes()), want.then_some(CUuuid(bytes)), "{case}");
        }
        assert_eq!(&text(CUuuid(bytes)), b"GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
