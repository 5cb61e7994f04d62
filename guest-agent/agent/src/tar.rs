//! tar, as much as trees need: ustar, pax for what does not fit, GNU long names when reading.

use crate::failure::{Failure, Outcome};
use std::io::{self, Read, Write};

pub const BLOCK_BYTES: usize = 512;
const PAX_BYTES_MAX: u64 = 1 << 20;
const NAME_BYTES_MAX: usize = 4_096 * 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    File,
    HardLink,
    Symlink,
    Folder,
    Fifo,
    Other(u8),
}

impl Kind {
    fn byte(self) -> u8 {
        match self {
            Kind::File => b'0',
            Kind::HardLink => b'1',
            Kind::Symlink => b'2',
            Kind::Folder => b'5',
            Kind::Fifo => b'6',
            Kind::Other(byte) => byte,
        }
    }

    fn from_byte(byte: u8) -> Self {
        match byte {
            0 | b'0' | b'7' => Kind::File,
            b'1' => Kind::HardLink,
            b'2' => Kind::Symlink,
            b'5' => Kind::Folder,
            b'6' => Kind::Fifo,
            other => Kind::Other(other),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub name: Vec<u8>,
    pub kind: Kind,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    pub mtime: i64,
    pub link: Vec<u8>,
}

/// Zero bytes behind content of `size` bytes.
pub fn padding(size: u64) -> usize {
    (BLOCK_BYTES - (size % BLOCK_BYTES as u64) as usize) % BLOCK_BYTES
}

fn octal(field: &mut [u8], value: u64) {
    let digits = field.len() - 1;
    let text = format!("{value:0digits$o}");
    // What does not fit stands in a pax record; the field then holds its lowest digits.
    field[..digits].copy_from_slice(&text.as_bytes()[text.len() - digits..]);
}

fn fits(field_digits: u32, value: u64) -> bool {
    value < 8u64.pow(field_digits)
}

fn block(header: &Header, name: &[u8], kind: u8, size: u64) -> [u8; BLOCK_BYTES] {
    let mut block = [0u8; BLOCK_BYTES];
    let put = |field: &mut [u8], bytes: &[u8]| {
        let count = bytes.len().min(field.len());
        field[..count].copy_from_slice(&bytes[..count]);
    };
    put(&mut block[0..100], name);
    octal(&mut block[100..108], u64::from(header.mode));
    octal(&mut block[108..116], u64::from(header.uid));
    octal(&mut block[116..124], u64::from(header.gid));
    octal(&mut block[124..136], size);
    octal(&mut block[136..148], header.mtime.max(0) as u64);
    block[156] = kind;
    put(&mut block[157..257], &header.link);
    block[257..265].copy_from_slice(b"ustar\x0000");
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    octal(&mut block[148..155], u64::from(sum));
    block
}

fn record(out: &mut Vec<u8>, key: &str, value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    out.extend_from_slice(format!("{length} {key}=").as_bytes());
    out.extend_from_slice(value);
    out.push(b'\n');
}

pub fn write_header(out: &mut impl Write, header: &Header) -> io::Result<()> {
    let mut pax = Vec::new();
    let odd = |text: &[u8]| text.len() > 100 || !text.is_ascii();
    if [&header.name, &header.link].iter().any(|text| std::str::from_utf8(text).is_err()) {
        record(&mut pax, "hdrcharset", b"BINARY");
    }
    if odd(&header.name) {
        record(&mut pax, "path", &header.name);
    }
    if odd(&header.link) {
        record(&mut pax, "linkpath", &header.link);
    }
    for (key, digits, value) in
        [("size", 11, header.size), ("uid", 7, header.uid.into()), ("gid", 7, header.gid.into())]
    {
        if !fits(digits, value) {
            record(&mut pax, key, value.to_string().as_bytes());
        }
    }
    if header.mtime < 0 || !fits(11, header.mtime as u64) {
        record(&mut pax, "mtime", header.mtime.to_string().as_bytes());
    }
    if !pax.is_empty() {
        out.write_all(&block(header, b"pax", b'x', pax.len() as u64))?;
        out.write_all(&pax)?;
        out.write_all(&[0; BLOCK_BYTES][..padding(pax.len() as u64)])?;
    }
    out.write_all(&block(header, &header.name, header.kind.byte(), header.size))
}

pub fn write_end(out: &mut impl Write) -> io::Result<()> {
    out.write_all(&[0; 2 * BLOCK_BYTES])
}

#[derive(Default)]
struct Overrides {
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    mtime: Option<i64>,
}

/// The next entry's header; None at the end. The caller reads `size` bytes and the padding behind it.
pub fn read_header(input: &mut impl Read) -> Outcome<Option<Header>> {
    let mut overrides = Overrides::default();
    loop {
        let mut block = [0u8; BLOCK_BYTES];
        if !read_block(input, &mut block)? || block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        check_sum(&block)?;
        let size = number(&block[124..136])?;
        match block[156] {
            b'x' => overrides.pax(&content(input, size)?)?,
            b'g' => drop(content(input, size)?),
            b'L' => overrides.name = Some(text(&content(input, size)?)),
            b'K' => overrides.link = Some(text(&content(input, size)?)),
            kind => return overrides.apply(&block, Kind::from_byte(kind), size).map(Some),
        }
    }
}

/// False: the stream ended before the block, which many writers take for the end.
fn read_block(input: &mut impl Read, block: &mut [u8; BLOCK_BYTES]) -> Outcome<bool> {
    let mut have = 0;
    while have < BLOCK_BYTES {
        match input.read(&mut block[have..])? {
            0 if have == 0 => return Ok(false),
            0 => return Err(Failure::invalid("tar: cut short")),
            count => have += count,
        }
    }
    Ok(true)
}

fn check_sum(block: &[u8; BLOCK_BYTES]) -> Outcome<()> {
    let sum = |of: fn(u8) -> i64| -> i64 {
        block.iter().enumerate().map(|(at, byte)| if (148..156).contains(&at) { 32 } else { of(*byte) }).sum()
    };
    let told = number(&block[148..156])? as i64;
    // Some old writers sum signed bytes.
    match told == sum(i64::from) || told == sum(|byte| i64::from(byte as i8)) {
        true => Ok(()),
        false => Err(Failure::invalid("tar: a header's checksum is wrong")),
    }
}

fn content(input: &mut impl Read, size: u64) -> Outcome<Vec<u8>> {
    if size > PAX_BYTES_MAX {
        return Err(Failure::new("too_large", "tar: an extended header of more than 1 MiB"));
    }
    let mut bytes = vec![0; size as usize + padding(size)];
    input.read_exact(&mut bytes).map_err(|_| Failure::invalid("tar: cut short"))?;
    bytes.truncate(size as usize);
    Ok(bytes)
}

fn text(bytes: &[u8]) -> Vec<u8> {
    bytes.split(|byte| *byte == 0).next().unwrap_or(b"").to_vec()
}

/// Octal digits, or GNU's binary form for what is larger.
fn number(field: &[u8]) -> Outcome<u64> {
    if field[0] & 0x80 != 0 {
        let (lead, low) = field.split_at(field.len() - 8);
        if lead[0] != 0x80 || lead[1..].iter().any(|byte| *byte != 0) {
            return Err(Failure::invalid("tar: a number out of range"));
        }
        return Ok(low.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)));
    }
    let mut digits =
        field.iter().skip_while(|byte| **byte == b' ').take_while(|byte| (b'0'..=b'7').contains(*byte));
    digits
        .try_fold(0u64, |value, digit| value.checked_mul(8)?.checked_add(u64::from(digit - b'0')))
        .ok_or_else(|| Failure::invalid("tar: a number out of range"))
}

impl Overrides {
    fn pax(&mut self, mut bytes: &[u8]) -> Outcome<()> {
        let wrong = || Failure::invalid("tar: a wrong pax record");
        while !bytes.is_empty() {
            let space = bytes.iter().position(|byte| *byte == b' ').ok_or_else(wrong)?;
            let length: usize =
                std::str::from_utf8(&bytes[..space]).ok().and_then(|t| t.parse().ok()).ok_or_else(wrong)?;
            if length <= space + 1 || length > bytes.len() {
                return Err(wrong());
            }
            let (line, rest) = bytes.split_at(length);
            let line = line[space + 1..].strip_suffix(b"\n").ok_or_else(wrong)?;
            let equals = line.iter().position(|byte| *byte == b'=').ok_or_else(wrong)?;
            let value = &line[equals + 1..];
            let digits = || std::str::from_utf8(value).ok().and_then(|text| text.split('.').next());
            match &line[..equals] {
                b"path" => self.name = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => self.size = Some(digits().and_then(|t| t.parse().ok()).ok_or_else(wrong)?),
                b"mtime" => self.mtime = Some(digits().and_then(|t| t.parse().ok()).ok_or_else(wrong)?),
                _ => {}
            }
            bytes = rest;
        }
        Ok(())
    }

    fn apply(self, block: &[u8; BLOCK_BYTES], kind: Kind, size: u64) -> Outcome<Header> {
        let mut name = text(&block[0..100]);
        if &block[257..262] == b"ustar" && block[262] == 0 && block[345] != 0 {
            name = [text(&block[345..500]), b"/".to_vec(), name].concat();
        }
        let name = self.name.unwrap_or(name);
        let link = self.link.unwrap_or_else(|| text(&block[157..257]));
        if name.len() > NAME_BYTES_MAX
            || link.len() > NAME_BYTES_MAX
            || [&name, &link].iter().any(|t| t.contains(&0))
        {
            return Err(Failure::new("name_too_long", "tar: a name of more than 16 KiB, or with NUL"));
        }
        Ok(Header {
            name,
            kind,
            mode: (number(&block[100..108])? & 0o7777) as u32,
            uid: number(&block[108..116])? as u32,
            gid: number(&block[116..124])? as u32,
            size: if kind == Kind::File { self.size.unwrap_or(size) } else { 0 },
            mtime: self.mtime.unwrap_or(number(&block[136..148])?.min(i64::MAX as u64) as i64),
            link,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(name: &[u8], size: u64) -> Header {
        Header {
            name: name.into(),
            kind: Kind::File,
            mode: 0o640,
            uid: 7,
            gid: 8,
            size,
            mtime: 1_700_000_000,
            link: vec![],
        }
    }

    fn round_trip(header: &Header) -> Header {
        let mut bytes = Vec::new();
        write_header(&mut bytes, header).expect("memory takes all");
        assert_eq!(bytes.len() % BLOCK_BYTES, 0);
        read_header(&mut &bytes[..]).expect("our own").expect("an entry")
    }

    #[test]
    fn comes_back() {
        let long = [b"d/".repeat(150), b"file".to_vec()].concat();
        for name in
            [&b"a"[..], &[b'x'; 100], &[b'x'; 101], &long, b"\xff\xfe", "h\u{e9}".as_bytes(), b"a b\n"]
        {
            assert_eq!(round_trip(&header(name, 3)), header(name, 3));
        }
        let huge = header(b"huge", 9 << 33);
        assert_eq!(round_trip(&huge), huge);
        let old = Header { mtime: -5, ..header(b"old", 0) };
        assert_eq!(round_trip(&old), old);
        let link = Header { kind: Kind::Symlink, link: vec![b'l'; 200], ..header(b"s", 0) };
        assert_eq!(round_trip(&link), link);
        assert_eq!(round_trip(&Header { uid: 3_000_000, ..header(b"u", 0) }).name, b"u");
    }

    #[test]
    fn noise_is_refused_not_believed() {
        let mut bytes = Vec::new();
        write_header(&mut bytes, &header(b"name", 10)).expect("memory");
        for at in 0..BLOCK_BYTES {
            let mut bad = bytes.clone();
            bad[at] ^= 0x15;
            let _ = read_header(&mut &bad[..]);
        }
        assert!(read_header(&mut &bytes[..300]).is_err());
        assert_eq!(read_header(&mut &[][..]).expect("the end"), None);
        let mut pax = block(&header(b"p", 0), b"pax", b'x', 6).to_vec();
        pax.extend_from_slice(b"99 a=b");
        pax.resize(1024, 0);
        assert!(read_header(&mut &pax[..]).is_err());
    }
}
