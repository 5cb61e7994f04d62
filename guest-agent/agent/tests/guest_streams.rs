//! Streams that the guest opens, as transcripts.

mod transcript;

use cloche_guest::session::Event;
use cloche_protocol::Kind;
use transcript::{Host, NONCE};

fn open(host: &mut Host, op: &str) -> u32 {
    let id = host.session.open_out(op, op.as_bytes().to_vec()).expect("an id");
    host.session.want_input(id);
    id
}

fn end(host: &mut Host, id: u32) -> Vec<Event> {
    host.send(Kind::End, id, b"E")
}

fn ended(id: u32) -> [Event; 1] {
    [Event::Ended { stream: id, payload: b"E".to_vec() }]
}

#[test]
fn a_connection_from_open_to_end() {
    let mut host = Host::new();
    let id = open(&mut host, "proxy");
    host.session.output(id, b"GET");
    assert_eq!(host.read(), ["OPEN 1 proxy", "DATA 1 GET"], "data does not wait for OPENED");
    assert!(host.send(Kind::Opened, id, b"{}").is_empty());
    assert_eq!(host.credit(id, 3, 65_539), [Event::Room(1)]);
    assert_eq!(host.send(Kind::Data, id, b"200"), [Event::Input(1)]);
    assert_eq!(host.session.input(id), b"200");
    host.session.taken(id, 3);
    assert!(host.read().is_empty(), "three bytes are no news");
    host.session.output_end(id);
    assert_eq!(host.read(), ["EOF 1 3"]);
    assert_eq!(host.eof(id, 3), [Event::Input(1)]);
    assert!(host.session.input_is_over(id));
    assert_eq!((end(&mut host, id), host.session.guest_streams()), (ended(id).into(), 0));
    assert_eq!(host.read(), ["CONFIRM 1 "]);
    host.session.forget_out(id);
    assert!(!host.session.is_open(id));
    assert!(end(&mut host, id).is_empty(), "END is heard once");
}

#[test]
fn opens_go_out_in_order_and_first() {
    let mut host = Host::new();
    // The turn stands at stream 4 when 1, 3 and 5 are opened.
    host.open(4, "exec", None);
    host.session.opened(4, "O".into());
    assert_eq!(host.read(), ["OPENED 4 O"]);
    for _ in 0..3 {
        let id = open(&mut host, "proxy");
        host.session.output(id, b"x");
    }
    host.session.output(4, b"out");
    let lines = host.read();
    assert_eq!(lines[..3], ["OPEN 1 proxy", "OPEN 3 proxy", "OPEN 5 proxy"]);
    assert_eq!(lines.len(), 7);
}

#[test]
fn the_last_words_are_read_after_the_end() {
    let mut host = Host::new();
    let id = open(&mut host, "connect");
    assert_eq!(host.read(), ["OPEN 1 connect"]);
    host.session.output(id, b"never heard");
    host.send(Kind::Data, id, b"403");
    assert_eq!(end(&mut host, id), ended(id));
    assert_eq!((host.session.input(id), host.session.input_is_over(id)), (&b"403"[..], false));
    assert!(host.send(Kind::Data, id, b"late").is_empty());
    host.session.taken(id, 3);
    assert!(host.session.input_is_over(id));
    assert_eq!(host.read(), ["CONFIRM 1 "], "no data after END");
    host.session.forget_out(id);
}

#[test]
fn credit_comes_with_a_quarter_of_the_window() {
    let mut host = Host::new();
    let id = open(&mut host, "proxy");
    host.read();
    host.send(Kind::Data, id, &[0; 16_383]);
    host.session.taken(id, 16_383);
    assert!(host.read().is_empty());
    host.send(Kind::Data, id, b"x");
    host.session.taken(id, 1);
    assert_eq!(host.read(), ["CREDIT 1 16384 81920"]);
    // What is not taken is no room, however much came.
    host.send(Kind::Data, id, &[0; 65_536]);
    assert!(host.read().is_empty());
}

#[test]
fn a_stream_counts_until_the_host_ends_it() {
    let mut host = Host::new();
    let id = open(&mut host, "proxy");
    host.session.output(id, b"bytes");
    host.read();
    host.session.abort_out(id);
    assert_eq!(host.read(), [r#"ABORT 1 {"reason":"the client is gone"}"#]);
    assert_eq!(host.session.guest_streams(), 1);
    assert_eq!(end(&mut host, id), ended(id));
    host.session.forget_out(id);
    assert_eq!((host.session.guest_streams(), host.read()), (0, vec!["CONFIRM 1 ".to_string()]));
    // One that the host never heard of is simply forgotten.
    let id = open(&mut host, "proxy");
    host.session.abort_out(id);
    assert_eq!((id, host.session.guest_streams(), host.read()), (3, 0, vec![]));
}

#[test]
fn a_new_host_knows_none_of_them() {
    let mut host = Host::new();
    host.open(2, "exec", None);
    host.session.opened(2, "O".into());
    let first = open(&mut host, "proxy");
    host.session.output(first, &[0; 60_000]);
    host.read();
    let second = open(&mut host, "proxy");
    let events = host.send(Kind::Reset, 0, &NONCE);
    assert_eq!(events, [Event::Close(first), Event::Close(second)]);
    assert_eq!(host.session.guest_streams(), 0);
    let state = host.read().remove(0);
    assert!(state.contains(r#""streams":{"2":{"#) && state.contains(r#""highest_guest":3"#), "{state}");
    assert!(!state.contains(r#""1":"#), "{state}");
    // What begins before RESUME waits for it, with a fresh id.
    let third = open(&mut host, "proxy");
    host.session.output(third, b"x");
    assert!(host.read().is_empty());
    let events = host.with_nonce(Kind::Resume, r#"{"streams":{"2":{"logged":0}}}"#);
    assert!(events.contains(&Event::Room(2)));
    let lines = host.read();
    assert_eq!(lines[0], "OPEN 5 proxy");
    assert!(lines.contains(&"DATA 5 x".to_string()), "{lines:?}");
    // A RESUME that names one is not sane.
    host.send(Kind::Reset, 0, &NONCE);
    open(&mut host, "proxy");
    host.read();
    host.with_nonce(Kind::Resume, r#"{"streams":{"7":{"logged":0}}}"#);
    assert!(host.read().is_empty());
}

#[test]
fn sent_bytes_are_not_kept() {
    let mut host = Host::new();
    let id = open(&mut host, "proxy");
    host.credit(id, 0, 1_048_576);
    for _ in 0..16 {
        host.session.output(id, &[0; 65_536]);
        host.read();
    }
    assert_eq!(host.session.room(id), 0, "the window still binds");
    // Sixteen such streams fill nothing: another's room is whole.
    let other = open(&mut host, "proxy");
    host.credit(other, 0, 1_048_576);
    assert_eq!(host.session.room(other), 1_048_576);
    assert_eq!(host.credit(id, 1_048_576, 2_097_152), [Event::Room(id)]);
    assert_eq!(host.session.room(id), 1_048_576);
}

#[test]
fn the_hosts_frames_on_strange_odd_streams_are_ignored() {
    let mut host = Host::new();
    let id = open(&mut host, "proxy");
    host.read();
    for kind in [Kind::Open, Kind::Confirm, Kind::Abort, Kind::Tell] {
        assert!(host.send(kind, id, b"{}").is_empty(), "{}", kind.name());
    }
    for kind in [Kind::End, Kind::Data, Kind::Opened] {
        assert!(host.send(kind, 9, b"{}").is_empty(), "{}", kind.name());
    }
    assert!(host.session.is_open(id) && host.read().is_empty());
}

/// As the loop reads a socket: `bytes` are what it has.
fn read_out(host: &mut Host, id: u32, bytes: &[u8]) -> Option<usize> {
    let read = |to: *mut u8, most: usize| {
        let count = bytes.len().min(most);
        // SAFETY: `most` bytes from the pointer on are ours to write.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, count) };
        (count, ())
    };
    // SAFETY: that many were written.
    unsafe { host.session.read_out(id, 1 << 20, read) }.map(|done| done.0)
}

#[test]
fn straight_into_a_frame() {
    let mut host = Host::new();
    let id = open(&mut host, "proxy");
    assert_eq!(read_out(&mut host, id, b"first"), Some(5));
    assert_eq!(read_out(&mut host, id, b""), Some(0), "nothing read is no frame");
    host.session.output(id, b"second");
    assert_eq!(read_out(&mut host, id, b"third"), None, "not before what waits");
    assert_eq!(host.read(), ["OPEN 1 proxy", "DATA 1 first", "DATA 1 second"]);
    assert_eq!(host.session.room(id), 65_536 - 11);
    host.credit(id, 11, 1_048_576);
    for _ in 0..4 {
        assert_eq!(read_out(&mut host, id, &[0; 200_000]), Some(131_072), "at most a frame");
    }
    assert_eq!(read_out(&mut host, id, b"more"), None, "a write's worth is enough");
    host.session.output_end(id);
    let frame = "DATA 1 [131072]";
    assert_eq!(host.read(), [frame, frame, frame, frame, "EOF 1 524299"]);
    host.send(Kind::Reset, 0, &NONCE);
    assert_eq!(read_out(&mut host, id, b"x"), None);
}

#[test]
fn straight_to_the_client() {
    let mut host = Host::new();
    let id = open(&mut host, "proxy");
    host.read();
    let frame = |payload| cloche_protocol::Frame { kind: Kind::Data, stream: 1, payload };
    let left = host.session.pass_in(frame(b"abcdef"), |bytes| bytes.len() - 2);
    assert_eq!(left.payload, b"ef");
    assert_eq!(host.send(Kind::Data, id, b"ef"), [Event::Input(1)]);
    let left = host.session.pass_in(frame(b"gh"), |_| panic!("not before what waits"));
    assert_eq!(left.payload, b"gh");
    assert_eq!(host.session.input(id), b"ef");
    host.session.taken(id, 2);
    assert!(host.session.pass_in(frame(&[0; 65_530]), <[u8]>::len).payload.is_empty());
    assert_eq!(host.read(), ["CREDIT 1 65536 196608"], "all of the window was used, so it grows");
    let beyond = vec![0; 131_073];
    assert_eq!(host.session.pass_in(frame(&beyond), |_| panic!("beyond the limit")).payload.len(), 131_073);
    assert_eq!(host.eof(id, 65_536), [Event::Input(1)]);
    assert!(host.session.input_is_over(id));
}
