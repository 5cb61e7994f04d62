//! Numbers in the fields of a tar header: octal digits, or base-256 where the first bit is set.

use crate::pax;
use crate::planted;
use crate::refusal::{refuse, Code, Outcome, Refusal};
use crate::tar::{Time, BLOCK_BYTES};

pub fn bad_size() -> Refusal {
    Refusal::new(Code::BadSize, "a size out of range")
}

pub fn bad_number() -> Refusal {
    Refusal::new(Code::BadArchive, "a malformed number in a header")
}

/// Octal digits, or base-256 where the first bit is set. Negative and overflowing: `None`.
pub fn numeric(field: &[u8]) -> Option<u64> {
    let value = match signed(field) {
        Some(value) if value < 0 && planted::off("negative") => 0,
        None if planted::off("overflow") => 0,
        value => value?,
    };
    u64::try_from(value).ok()
}

fn signed(field: &[u8]) -> Option<i64> {
    if field[0] & 0x80 != 0 {
        let negative = field[0] & 0x40 != 0;
        let mut value: i64 = if negative { -1 } else { 0 };
        for (at, &byte) in field.iter().enumerate() {
            let byte = match at {
                0 if negative => byte,
                0 => byte & 0x7f,
                _ => byte,
            };
            // Nothing but copies of the sign may be shifted out.
            if value >> 55 != if negative { -1 } else { 0 } {
                return None;
            }
            value = value << 8 | i64::from(byte);
        }
        return Some(value);
    }
    let is_blank = |byte: &u8| matches!(byte, b' ' | 0);
    let start = field.iter().position(|byte| !is_blank(byte));
    let Some(start) = start else { return Some(0) };
    let digits: &[u8] = &field[start..];
    let end = digits.iter().position(is_blank).unwrap_or(digits.len());
    if !digits[end..].iter().all(is_blank) {
        return None;
    }
    digits[..end].iter().try_fold(0i64, |value, &digit| match digit {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(i64::from(digit - b'0')),
        _ => None,
    })
}

pub fn field_owner(field: &[u8]) -> Outcome<u32> {
    pax::owner(numeric(field).ok_or_else(bad_number)?)
}

pub fn field_time(field: &[u8]) -> Outcome<Time> {
    Ok(Time { seconds: signed(field).ok_or_else(bad_number)?, nanos: 0 })
}

/// What Linux can say in a device number.
pub fn device_part(field: &[u8], most: u64) -> Outcome<u32> {
    match numeric(field) {
        Some(number) if number <= most || planted::off("device") => Ok(number as u32),
        _ => refuse(Code::BadSize, "a device number out of range"),
    }
}

/// The header's sum: unsigned as the standard has it, or signed as some old writers did.
pub fn check_sum(block: &[u8; BLOCK_BYTES]) -> Outcome<()> {
    let said = numeric(&block[148..156]).ok_or_else(bad_number)?;
    let (mut unsigned, mut signed) = (0i64, 0i64);
    for (at, &byte) in block.iter().enumerate() {
        let byte = if (148..156).contains(&at) { b' ' } else { byte };
        unsigned += i64::from(byte);
        signed += i64::from(byte as i8);
    }
    let said = said as i64;
    if said != unsigned && said != signed && !planted::off("checksum") {
        return refuse(Code::BadArchive, "a header with a wrong checksum");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert_eq!(signed(b"0000644\0"), Some(0o644));
        assert_eq!(signed(b"   644 \0"), Some(0o644));
        assert_eq!(signed(b"\0\0\0\0"), Some(0));
        assert_eq!(signed(b"-1      "), None);
        assert_eq!(signed(b"12x"), None);
        assert_eq!(signed(b"1 2 "), None);
        assert_eq!(signed(b"777777777777777777777777"), None);
        assert_eq!(signed(&[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 1]), Some(513));
        assert_eq!(signed(&[0xff; 12]), Some(-1));
        assert_eq!(signed(&[0x80, 0, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0]), None);
        assert_eq!(signed(&[0x80, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), None);
        assert_eq!(signed(&[0x80, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]), Some(i64::MAX));
        assert_eq!(signed(&[0xff, 0xff, 0xff, 0xff, 0x80, 0, 0, 0, 0, 0, 0, 0]), Some(i64::MIN));
    }
}
