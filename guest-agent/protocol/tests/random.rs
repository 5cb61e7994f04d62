//! A seeded fuzz of the decoder: no panic, no memory beyond what was pushed, good frames survive.

use cloche_protocol::{encode, Decoder, Kind};

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}

#[test]
fn a_hundred_thousand_inputs() {
    let mut random = Random(0x00c1_0c4e);
    for round in 0..100_000 {
        let mut input = Vec::new();
        for _ in 0..random.below(4) {
            let kind = Kind::ALL[random.below(15)];
            let payload = {
                let n = random.below(40);
                random.bytes(n)
            };
            encode(kind, random.next() as u32, &payload, &mut input);
            input.resize(input.len() + random.below(3), 0);
        }
        match random.below(4) {
            0 => {
                let n = random.below(60);
                let noise = random.bytes(n);
                input.extend(noise);
            }
            1 if !input.is_empty() => {
                let at = random.below(input.len());
                input[at] ^= 1 << random.below(8);
            }
            2 if !input.is_empty() => input.truncate(random.below(input.len())),
            _ => {}
        }
        let mut nonce = [0; 16];
        nonce.copy_from_slice(&random.bytes(16));
        // The zeros that promise RESET is found are dear: every 1,000th input has them.
        let padded = round % 1_000 == 0;
        input.resize(input.len() + if padded { 131_085 } else { 0 }, 0);
        let noise_bytes = input.len();
        encode(Kind::Reset, 0, &nonce, &mut input);
        let (mut decoder, mut seen) = (Decoder::new(), false);
        let cut = random.below(noise_bytes + 1);
        for piece in [&input[..cut], &input[cut..]] {
            decoder.push(piece);
            while let Some(next) = decoder.next() {
                seen |= next.is_ok_and(|f| f.kind == Kind::Reset && f.payload == nonce);
            }
        }
        assert!(seen || !padded, "RESET must be found behind any noise");
    }
}
