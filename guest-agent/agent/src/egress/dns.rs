//! DNS messages, as far as the guest's resolver needs them: one question in, one answer out. Pure.

const HEADER_BYTES: usize = 12;
const LABEL_BYTES_MAX: usize = 63;
const NAME_CHARS_MAX: usize = 253;
/// What a client without EDNS can take; no answer here is longer.
pub const ANSWER_BYTES_MAX: usize = 512;
pub const TYPE_A: u16 = 1;
const CLASS_IN: u16 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    Ok = 0,
    Malformed = 1,
    Failed = 2,
    NoName = 3,
    NotImplemented = 4,
    Refused = 5,
}

/// One question. The name is in lower case; `asked` repeats the client's own spelling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    pub id: u16,
    pub name: String,
    pub kind: u16,
    recursion: bool,
    asked: Vec<u8>,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Query {
    Question(Question),
    /// It can be answered, but not from here.
    Answer(Vec<u8>),
    /// Not a query at all: an answer would only make more noise.
    Ignore,
}

pub fn parse(packet: &[u8]) -> Query {
    let Some((header, body)) = packet.split_first_chunk::<HEADER_BYTES>() else { return Query::Ignore };
    let word = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
    let (id, flags) = (word(0), word(2));
    let recursion = flags & 0x0100 != 0;
    let refuse = |code| Query::Answer(empty(id, recursion, code));
    if flags & 0x8000 != 0 {
        return Query::Ignore;
    }
    if flags >> 11 & 15 != 0 {
        return refuse(Code::NotImplemented);
    }
    // More in the other sections (EDNS) is nobody's concern here.
    if word(4) != 1 {
        return refuse(Code::Malformed);
    }
    let Some((name, length)) = name(body) else { return refuse(Code::Malformed) };
    let Some(tail) = body.get(length..length + 4) else { return refuse(Code::Malformed) };
    let (kind, class) = (u16::from_be_bytes([tail[0], tail[1]]), u16::from_be_bytes([tail[2], tail[3]]));
    let asked = body[..length + 4].to_vec();
    let question = Question { id, name: name.unwrap_or_default(), kind, recursion, asked };
    if class != CLASS_IN {
        return Query::Answer(question.answer(Code::Refused, None));
    }
    if question.name.is_empty() {
        // The root, or a name that no host has.
        return Query::Answer(question.answer(Code::NoName, None));
    }
    Query::Question(question)
}

/// The name and how many bytes it took; an inner None is well-formed and cannot be a host's name.
fn name(body: &[u8]) -> Option<(Option<String>, usize)> {
    let (mut at, mut text, mut good) = (0, String::new(), true);
    loop {
        let length = usize::from(*body.get(at)?);
        at += 1;
        if length == 0 {
            break;
        }
        // Also a compression pointer, which has nothing to point to in a question.
        if length > LABEL_BYTES_MAX {
            return None;
        }
        let label = body.get(at..at + length)?;
        at += length;
        if text.len() + usize::from(!text.is_empty()) + length > NAME_CHARS_MAX {
            return None;
        }
        if !text.is_empty() {
            text.push('.');
        }
        good &= label.iter().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'));
        text.extend(label.iter().map(|byte| byte.to_ascii_lowercase() as char).filter(char::is_ascii));
    }
    Some((good.then_some(text), at))
}

fn flags(recursion: bool, code: Code) -> u16 {
    // An answer, recursion available; recursion desired is repeated.
    0x8080 | u16::from(recursion) << 8 | code as u16
}

fn header(id: u16, flags: u16, questions: u16, answers: u16) -> Vec<u8> {
    [id, flags, questions, answers, 0, 0].iter().flat_map(|word| word.to_be_bytes()).collect()
}

fn empty(id: u16, recursion: bool, code: Code) -> Vec<u8> {
    header(id, flags(recursion, code), 0, 0)
}

impl Question {
    pub fn answer(&self, code: Code, address: Option<(std::net::Ipv4Addr, u32)>) -> Vec<u8> {
        let mut out = header(self.id, flags(self.recursion, code), 1, u16::from(address.is_some()));
        out.extend_from_slice(&self.asked);
        if let Some((address, ttl_s)) = address {
            // The name is the one at offset 12.
            out.extend_from_slice(&[0xc0, 0x0c, 0, TYPE_A as u8, 0, CLASS_IN as u8]);
            out.extend_from_slice(&ttl_s.to_be_bytes());
            out.extend_from_slice(&[0, 4]);
            out.extend_from_slice(&address.octets());
        }
        debug_assert!(out.len() <= ANSWER_BYTES_MAX);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn packet(name: &[u8], kind: u16) -> Vec<u8> {
        let mut out = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        out.extend_from_slice(name);
        out.extend_from_slice(&kind.to_be_bytes());
        out.extend_from_slice(&[0, 1]);
        out
    }

    fn labels(labels: &[&[u8]]) -> Vec<u8> {
        let mut out: Vec<u8> = labels.iter().flat_map(|l| [&[l.len() as u8][..], l].concat()).collect();
        out.push(0);
        out
    }

    fn code(query: Query) -> u8 {
        match query {
            Query::Answer(bytes) => bytes[3] & 15,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_question_and_its_answer() {
        let ask = packet(&labels(&[b"Api", b"eXample", b"com"]), TYPE_A);
        let Query::Question(question) = parse(&ask) else { panic!("a question") };
        assert_eq!((question.id, question.name.as_str(), question.kind), (0x1234, "api.example.com", 1));
        let answer = question.answer(Code::Ok, Some((Ipv4Addr::new(127, 64, 0, 1), 5)));
        let mut expected = vec![0x12, 0x34, 0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0];
        expected.extend_from_slice(&ask[12..]);
        expected.extend_from_slice(&[0xc0, 0x0c, 0, 1, 0, 1, 0, 0, 0, 5, 0, 4, 127, 64, 0, 1]);
        assert_eq!(answer, expected, "the client's own spelling comes back");
        let refused = question.answer(Code::NoName, None);
        assert_eq!((refused.len(), refused[3] & 15, refused[7]), (ask.len(), 3, 0));
    }

    #[test]
    fn additional_records_are_ignored() {
        let mut ask = packet(&labels(&[b"a", b"b"]), 28);
        ask[11] = 1;
        ask.extend_from_slice(&[0, 0, 41, 16, 0, 0, 0, 0, 0, 0, 0]);
        let Query::Question(question) = parse(&ask) else { panic!("a question") };
        assert_eq!((question.name.as_str(), question.kind), ("a.b", 28));
        assert_eq!(question.answer(Code::Ok, None).len(), 12 + 5 + 4);
    }

    #[test]
    fn hostile_packets() {
        assert_eq!(parse(b""), Query::Ignore);
        assert_eq!(parse(&[0; 11]), Query::Ignore);
        let good = packet(&labels(&[b"a", b"b"]), 1);
        let changed = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            parse(&bytes)
        };
        assert_eq!(changed(2, 0x81), Query::Ignore, "an answer is not answered");
        assert_eq!(code(changed(2, 0x28)), Code::NotImplemented as u8);
        assert_eq!(code(changed(5, 0)), Code::Malformed as u8);
        assert_eq!(code(changed(5, 2)), Code::Malformed as u8);
        assert_eq!(code(changed(good.len() - 1, 3)), Code::Refused as u8, "class CHAOS");
        for end in 12..good.len() {
            assert_eq!(code(parse(&good[..end])), Code::Malformed as u8, "cut at {end}");
        }
        for bad in [&[0xc0, 0x0c][..], &[64, b'a', 0], &[0x80, 0], &[5, b'a', 0]] {
            assert_eq!(code(parse(&packet(bad, 1))), Code::Malformed as u8, "{bad:?}");
        }
        for odd in [&b"a b"[..], b"a.b", b"\0", b"a\xff", b"a/b", b"\"", b"a\n"] {
            assert_eq!(code(parse(&packet(&labels(&[odd, b"com"]), 1))), Code::NoName as u8, "{odd:?}");
        }
        assert_eq!(code(parse(&packet(&[0], 1))), Code::NoName as u8, "the root");
    }

    #[test]
    fn long_names() {
        let label = [b'a'; 63];
        let longest: Vec<&[u8]> = vec![&label, &label, &label, &label[..61]];
        let Query::Question(question) = parse(&packet(&labels(&longest), 1)) else {
            panic!("253 characters")
        };
        assert_eq!(question.name.len(), 253);
        assert!(question.answer(Code::Ok, Some((Ipv4Addr::LOCALHOST, 5))).len() <= ANSWER_BYTES_MAX);
        let longer: Vec<&[u8]> = vec![&label, &label, &label, &label[..62]];
        assert_eq!(code(parse(&packet(&labels(&longer), 1))), Code::Malformed as u8);
        let endless: Vec<&[u8]> = vec![&label; 1000];
        assert_eq!(code(parse(&packet(&labels(&endless), 1))), Code::Malformed as u8);
    }

    /// Any bytes: no panic, and what is answered is an answer to the same id.
    #[test]
    fn random_bytes() {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let base = packet(&labels(&[b"some", b"name", b"example"]), 1);
        for _ in 0..20_000 {
            let mut bytes = base.clone();
            for _ in 0..3 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let at = (state >> 8) as usize % bytes.len();
                bytes[at] = state as u8;
            }
            bytes.truncate((state >> 32) as usize % (base.len() + 1));
            match parse(&bytes) {
                Query::Ignore => {}
                Query::Answer(answer) => assert_eq!(answer[..2], bytes[..2]),
                Query::Question(question) => {
                    assert!(question.name.len() <= 253 && question.name.is_ascii());
                    assert_eq!(question.answer(Code::Failed, None)[..2], bytes[..2]);
                }
            }
        }
    }
}
