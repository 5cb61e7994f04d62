#![no_main]
//! Any bytes, in any pieces, give the same frames and errors.

use cloche_protocol::Decoder;
use libfuzzer_sys::fuzz_target;

fn decode(pieces: &[&[u8]]) -> Vec<Result<(u8, u32, Vec<u8>), &'static str>> {
    let mut decoder = Decoder::new();
    let mut seen = Vec::new();
    for piece in pieces {
        decoder.push(piece);
        while let Some(next) = decoder.next() {
            seen.push(next.map(|f| (f.kind as u8, f.stream, f.payload.to_vec())).map_err(|e| e.name()));
        }
    }
    seen
}

fuzz_target!(|data: &[u8]| {
    let Some((cut, bytes)) = data.split_first() else { return };
    let (a, b) = bytes.split_at(bytes.len() * usize::from(*cut) / 256);
    assert_eq!(decode(&[bytes]), decode(&[a, b]));
});
