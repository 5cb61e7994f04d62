#![no_main]
//! Whatever a program in the guest sends to the resolver: bounded names, and answers that fit a datagram.

use cloche_guest::egress::dns::{parse, Code, Query, ANSWER_BYTES_MAX};
use libfuzzer_sys::fuzz_target;
use std::net::Ipv4Addr;

fuzz_target!(|data: &[u8]| match parse(data) {
    Query::Ignore => {}
    Query::Answer(answer) => assert!(answer.len() <= ANSWER_BYTES_MAX && answer[..2] == data[..2]),
    Query::Question(question) => {
        assert!(!question.name.is_empty() && question.name.len() <= 253);
        assert!(question.name.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.')));
        let answer = question.answer(Code::Ok, Some((Ipv4Addr::LOCALHOST, 1)));
        assert!(answer.len() <= ANSWER_BYTES_MAX && answer[..2] == data[..2]);
    }
});
