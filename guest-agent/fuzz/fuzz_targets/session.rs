#![no_main]
//! What a host may send reaches the dispatcher: no panic, no unbounded memory.

use cloche_guest::session::{Event, Session};
use cloche_guest::wire;
use cloche_protocol::Decoder;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut session = Session::new("{}".into());
    let mut decoder = Decoder::new();
    let mut events = Vec::new();
    decoder.push(data);
    while let Some(next) = decoder.next() {
        let Ok(frame) = next else { continue };
        session.handle(frame, &mut events);
        for event in events.drain(..) {
            match event {
                Event::Open { stream, payload } if session.may_open(stream) => {
                    let head = wire::parse::<wire::Head>(&payload);
                    let _ = wire::parse::<wire::Exec>(&payload);
                    let _ = wire::parse::<wire::Bind>(&payload);
                    let stderr = head.ok().and_then(|h| h.stderr_stream).filter(|s| *s > stream && s % 2 == 0);
                    session.open(stream, "exec", None, stderr);
                    session.want_input(stream);
                    session.opened(stream, "{}".into());
                    session.output(stream, b"some output");
                }
                Event::Input(id) => session.taken(id, session.input(id).len()),
                Event::Abort(id) => {
                    session.output_cut(id);
                    session.output_end(id);
                    session.end(id, b"{}".to_vec());
                }
                Event::Tell { payload, .. } => {
                    drop(wire::parse::<wire::Tell>(&payload));
                    let id = session.open_out("proxy", b"{}".to_vec()).unwrap_or(1);
                    session.want_input(id);
                    session.output(id, b"a request");
                    if id % 4 == 3 {
                        session.abort_out(id - 2);
                    }
                }
                Event::Ended { stream, payload } => {
                    drop(wire::parse::<wire::End>(&payload));
                    session.forget_out(stream);
                }
                _ => {}
            }
        }
        session.fill();
        session.out.wrote(session.out.pending().len() / 2);
    }
});
