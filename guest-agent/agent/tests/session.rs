//! The session's rules as transcripts: frames in, frames out, no descriptors.

mod transcript;

use cloche_guest::session::Event;
use cloche_protocol::{encode, Kind};
use transcript::{Host, NONCE};

#[test]
fn a_command_from_open_to_confirm() {
    let mut host = Host::new();
    host.open(2, "exec", Some(4));
    host.session.opened(2, "O".into());
    host.session.output(2, b"out");
    host.session.output(4, b"err");
    assert_eq!(host.read(), ["OPENED 2 O", "DATA 2 out", "DATA 4 err"]);
    host.session.output(4, &[0; 70_000]);
    host.session.output_end(2);
    host.session.output_end(4);
    host.session.end(2, b"E".to_vec());
    assert_eq!(host.read(), ["EOF 2 3", "DATA 4 [65533]"], "END waits for stderr");
    host.credit(4, 65_536, 131_072);
    assert_eq!(host.read(), ["DATA 4 [4467]", "EOF 4 70003", "END 2 E"]);
    assert_eq!(host.send(Kind::Confirm, 2, b""), [Event::Forget(2)]);
    assert!(!host.session.is_open(2) && !host.session.is_open(4));
    assert!(host.send(Kind::Data, 2, b"late").is_empty());
    assert!(host.send(Kind::Open, 2, b"{}").is_empty(), "an id is used once");
}

#[test]
fn output_stops_at_the_limit() {
    let mut host = Host::new();
    host.open(2, "exec", None);
    host.session.opened(2, "O".into());
    assert_eq!(host.session.room(2), 65_536);
    host.session.output(2, &[1; 65_536]);
    assert_eq!(host.session.room(2), 0);
    assert_eq!(host.read(), ["OPENED 2 O", "DATA 2 [65536]"]);
    assert_eq!(host.credit(2, 65_536, 65_536 + 1_048_576), [Event::Room(2)]);
    assert_eq!(host.session.room(2), 1_048_576);
    assert!(host.credit(2, 10, 2_000_000).is_empty(), "credit never goes back");
    assert!(host.credit(2, 70_000, 2_000_000).is_empty(), "nor ahead of what was sent");
    host.session.output(2, &[2; 300_000]);
    assert_eq!(host.read(), ["DATA 2 [131072]", "DATA 2 [131072]", "DATA 2 [37856]"]);
}

#[test]
fn input_is_credited_by_what_is_held_and_taken() {
    let mut host = Host::new();
    host.open(2, "exec", None);
    host.session.want_input(2);
    host.session.opened(2, "O".into());
    assert_eq!(host.send(Kind::Data, 2, b"hello"), [Event::Input(2)]);
    assert_eq!(host.read(), ["OPENED 2 O", "CREDIT 2 5 65536"], "held, not yet written");
    assert_eq!(host.session.input(2), b"hello");
    host.session.taken(2, 5);
    assert_eq!(host.read(), ["CREDIT 2 5 65541"]);
    assert!(host.eof(2, 4).is_empty(), "an end at the wrong place");
    assert_eq!(host.eof(2, 5), [Event::Input(2)]);
    assert!(host.session.input_is_over(2));
    assert!(host.send(Kind::Data, 2, b"more").is_empty());
}

#[test]
fn windows_grow_while_drained() {
    let mut host = Host::new();
    host.open(2, "file.write", None);
    host.session.want_input(2);
    host.session.opened(2, "O".into());
    host.read();
    let mut limit = 65_536u64;
    let mut sent = 0u64;
    for _ in 0..40 {
        let count = (limit - sent).min(131_072) as usize;
        host.send(Kind::Data, 2, &vec![0; count]);
        sent += count as u64;
        while !host.session.input(2).is_empty() {
            host.session.taken(2, host.session.input(2).len());
        }
        for line in host.read() {
            limit = line.rsplit(' ').next().expect("a limit").parse().expect("a number");
        }
    }
    assert_eq!(limit - sent, 1_048_576);
    assert!(host.send(Kind::Data, 2, &[0; 131_072]).len() == 1);
}

#[test]
fn more_than_the_limit_is_ignored() {
    let mut host = Host::new();
    host.open(2, "exec", None);
    host.session.want_input(2);
    assert!(!host.send(Kind::Data, 2, &[0; 65_536]).is_empty());
    assert!(host.send(Kind::Data, 2, b"x").is_empty());
}

#[test]
fn the_same_open_is_answered_again() {
    let mut host = Host::new();
    host.open(2, "exec", None);
    host.session.opened(2, "O".into());
    host.session.output_end(2);
    host.session.end(2, b"E".to_vec());
    assert_eq!(host.read(), ["OPENED 2 O", "EOF 2 0", "END 2 E"]);
    host.session.answer_again(2);
    assert_eq!(host.read(), ["OPENED 2 O", "END 2 E"]);
}

#[test]
fn streams_take_turns() {
    let mut host = Host::new();
    for id in [2, 4] {
        host.open(id, "exec", None);
        host.credit(id, 0, 1_048_576);
        host.session.output(id, &[0; 300_000]);
    }
    host.session.fill();
    let turns = ["DATA 2 [131072]", "DATA 4 [131072]", "DATA 2 [131072]", "DATA 4 [131072]"];
    assert_eq!(host.take(usize::MAX), turns, "one write's worth");
}

#[test]
fn re_attach_in_the_middle_of_a_frame() {
    let mut host = Host::new();
    host.open(2, "exec", Some(4));
    host.session.want_input(2);
    host.session.opened(2, "O".into());
    host.send(Kind::Data, 2, b"in");
    host.session.output(2, b"0123456789");
    host.session.fill();
    host.session.output(2, b"abc");
    host.session.fill();
    // 14 bytes of OPENED, 29 of CREDIT, then 20 of the 23 of DATA.
    assert_eq!(host.take(14 + 29 + 20), ["OPENED 2 O", "CREDIT 2 2 65536"]);
    host.send(Kind::Reset, 0, &NONCE);
    let lines = host.read();
    assert_eq!(lines[0], "DATA 2 0123456789", "the frame being written is finished");
    assert_eq!(
        lines[1],
        concat!(
            r#"STATE 0 {"streams":{"2":{"op":"exec","command":"c1","sent":13,"acked":0,"received":2,"#,
            r#""opened":true,"eof_sent":false,"eof_received":false,"ended":false},"#,
            r#""4":{"op":"exec.stderr","command":"c1","sent":0,"acked":0,"received":0,"#,
            r#""opened":false,"eof_sent":false,"eof_received":false,"ended":false}},"#,
            r#""highest_host":4,"highest_guest":0,"hello":{}}"#
        )
    );
    assert_eq!(lines.len(), 2, "whole queued frames are dropped");
    host.session.output(2, b"!");
    host.session.output_end(2);
    host.session.output_end(4);
    host.session.end(2, b"E".to_vec());
    host.send(Kind::Ping, 0, b"p");
    assert!(host.read().is_empty(), "silent until RESUME");
    assert!(host.with_nonce(Kind::Resume, r#"{"streams":{"2":{"logged":14}}}"#).is_empty());
    assert!(host.read().is_empty(), "logged beyond sent is no RESUME");
    let resume = r#"{"streams":{"2":{"logged":4},"4":{"logged":0}},"close":[]}"#;
    assert_eq!(host.with_nonce(Kind::Resume, resume), [Event::Room(2), Event::Room(4)]);
    assert_eq!(host.read(), ["EOF 4 0", "CREDIT 2 2 65538", "DATA 2 456789abc!", "EOF 2 14", "END 2 E"]);
}

#[test]
fn what_resume_does_not_name_is_closed() {
    let mut host = Host::new();
    for id in [2, 4, 6] {
        host.open(id, "exec", None);
    }
    host.send(Kind::Reset, 0, &NONCE);
    host.read();
    let events =
        host.with_nonce(Kind::Resume, r#"{"streams":{"2":{"logged":0},"4":{"logged":0}},"close":[4]}"#);
    assert_eq!(events, [Event::Close(4), Event::Close(6), Event::Room(2)]);
    assert!(host.session.is_open(2) && !host.session.is_open(4) && !host.session.is_open(6));
}

#[test]
fn a_second_reset_has_a_new_nonce() {
    let mut host = Host::new();
    host.send(Kind::Reset, 0, &[1; 16]);
    host.send(Kind::Reset, 0, &NONCE);
    assert_eq!(host.read().len(), 1, "the first STATE was never begun");
    host.send(Kind::Resume, 0, &[&[1; 16][..], b"{}"].concat());
    host.send(Kind::Ping, 0, b"x");
    assert!(host.read().is_empty());
    host.with_nonce(Kind::Resume, "{}");
    for _ in 0..200 {
        host.send(Kind::Ping, 0, b"x");
        assert_eq!(host.read(), ["PONG 0 x"]);
    }
}

#[test]
fn bounds() {
    let mut host = Host::new();
    for n in 1..=512 {
        assert!(host.session.open(2 * n, "exec", Some("c2345678901234567890"), None));
        host.session.opened(2 * n, "O".into());
    }
    assert!(!host.session.open(1_026, "exec", None, None));
    host.session.refuse(1_026, b"R");
    assert!(host.read().contains(&"END 1026 R".to_string()));
    host.send(Kind::Reset, 0, &NONCE);
    let state = host.read();
    assert!(state[0].len() < 131_072 && state[0].contains(r#""1024":{"op":"exec""#));
    for _ in 0..1_000 {
        host.send(Kind::Ping, 0, &[b'x'; 64]);
    }
    host.with_nonce(Kind::Resume, "{}");
    for _ in 0..1_000 {
        host.send(Kind::Ping, 0, &[b'x'; 64]);
    }
    assert!(host.session.out.pending().len() < 16_384);
}

#[test]
fn held_bytes_are_bounded_over_all_streams() {
    let mut host = Host::new();
    let mut held = 0;
    for n in 1..=40 {
        host.open(2 * n, "exec", None);
        host.session.opened(2 * n, "O".into());
        host.credit(2 * n, 0, 1_048_576);
        let room = host.session.room(2 * n);
        host.session.output(2 * n, &vec![0; room]);
        held += room;
    }
    assert_eq!(held, 16_777_216);
    host.read();
    let events = host.credit(2, 1_048_576, 2_097_152);
    assert_eq!(events.len(), 40, "all who starved may go on");
}

/// The dispatcher under noise: no panic, bounded output, and RESET still works. See `fuzz/`.
#[test]
fn a_hundred_thousand_random_frames() {
    let mut random = 0x5eed_u64;
    let mut next = move |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    let mut host = Host::new();
    for round in 0..100_000 {
        let kind = Kind::ALL[next(15) as usize];
        let stream = next(12) as u32;
        let mut payload: Vec<u8> = (0..next(24)).map(|_| next(256) as u8).collect();
        if next(2) == 0 {
            payload = [next(40).to_le_bytes(), next(2_000_000).to_le_bytes()].concat();
        }
        for event in host.send(kind, stream, &payload) {
            if let Event::Open { stream, .. } = event {
                if host.session.may_open(stream) {
                    host.session.open(stream, "exec", None, (next(2) == 0).then_some(stream + 2));
                    host.session.want_input(stream);
                    host.session.opened(stream, "O".into());
                }
            }
        }
        let id = next(12) as u32;
        match next(9) {
            0 => {
                let room = host.session.room(id).min(1_000);
                host.session.output(id, &vec![0; room]);
            }
            1 => host.session.output_end(id),
            2 => host.session.end(id, b"E".to_vec()),
            3 => host.session.taken(id, host.session.input(id).len()),
            4 => host.session.output_cut(id),
            5 if host.session.guest_streams() < 4 => drop(host.session.open_out("proxy", b"{}".to_vec())),
            6 if id % 2 == 1 => host.session.abort_out(id),
            7 if id % 2 == 1 => host.session.forget_out(id),
            _ => {}
        }
        if round % 3 == 0 {
            host.read();
        }
        if round % 1_000 == 0 {
            host = Host::new();
        }
    }
    host.send(Kind::Reset, 0, &NONCE);
    assert!(host.read().last().is_some_and(|line| line.starts_with("STATE")));
    let mut bytes = Vec::new();
    encode(Kind::Ping, 0, b"", &mut bytes);
    assert!(!bytes.is_empty());
}
