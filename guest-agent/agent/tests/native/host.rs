//! The host's side for tests: blocking, one operation at a time.

use cloche_protocol::{encode, Decoder, Kind};
use serde_json::{json, Value};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

pub struct Host {
    pub socket: UnixStream,
    pub decoder: Decoder,
    pub child: Child,
    next: u32,
}

pub type Frame = (Kind, u32, Vec<u8>);

#[derive(Debug, Default)]
pub struct Done {
    pub end: Value,
    pub opened: Value,
    pub out: Vec<u8>,
    pub err: Vec<u8>,
}

impl Drop for Host {
    fn drop(&mut self) {
        // Closing the carrier would end it too; a failed test should not wait for that.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn me() -> String {
    format!("{}:{}", rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw())
}

impl Host {
    pub fn start() -> Self {
        let (socket, theirs) = UnixStream::pair().expect("a socketpair");
        socket.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        let child = Command::new(env!("CARGO_BIN_EXE_cloche-guest"))
            .arg("--no-mounts")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn()
            .expect("the agent");
        let mut host = Host { socket, decoder: Decoder::new(), child, next: 2 };
        let (kind, _, hello) = host.frame();
        assert_eq!(kind, Kind::Hello);
        assert_eq!(serde_json::from_slice::<Value>(&hello).expect("JSON")["gen"], 1);
        let done = host.run(json!({"op": "bind", "user": me(), "env": {"FROM_BIND": "yes"}}), None);
        assert!(done.end["ok"].is_object(), "{done:?}");
        host
    }

    pub fn send(&mut self, kind: Kind, stream: u32, payload: &[u8]) {
        let mut bytes = Vec::new();
        encode(kind, stream, payload, &mut bytes);
        self.socket.write_all(&bytes).expect("the agent reads");
    }

    pub fn frame(&mut self) -> Frame {
        loop {
            if let Some(frame) = self.decoder.next() {
                let frame = frame.expect("a good frame");
                return (frame.kind, frame.stream, frame.payload.to_vec());
            }
            let space = self.decoder.space(262_144);
            let count = self.socket.read(space).expect("a frame in time");
            assert!(count > 0, "the agent hung up");
            self.decoder.filled(count);
        }
    }

    pub fn open(&mut self, ask: Value) -> u32 {
        let id = self.next;
        self.next += if ask["stderr_stream"].is_null() { 2 } else { 4 };
        self.send(Kind::Open, id, ask.to_string().as_bytes());
        id
    }

    pub fn next_id(&self) -> u32 {
        self.next
    }

    pub fn credit(&mut self, stream: u32, consumed: usize) {
        let consumed = consumed as u64;
        let payload = [consumed.to_le_bytes(), (consumed + 1_048_576).to_le_bytes()].concat();
        self.send(Kind::Credit, stream, &payload);
    }

    /// One operation from OPEN to CONFIRM; `input` is all the data for it.
    pub fn run(&mut self, ask: Value, input: Option<&[u8]>) -> Done {
        let id = self.open(ask);
        self.finish(id, input, Done::default())
    }

    pub fn finish(&mut self, id: u32, input: Option<&[u8]>, mut done: Done) -> Done {
        let (mut sent, mut limit, mut eof) = (0usize, 65_536usize, input.is_none());
        loop {
            while let Some(bytes) = input.filter(|bytes| sent < bytes.len().min(limit)) {
                let end = bytes.len().min(limit).min(sent + 131_072);
                self.send(Kind::Data, id, &bytes[sent..end]);
                sent = end;
            }
            if !eof && input.is_some_and(|bytes| sent == bytes.len()) {
                self.send(Kind::Eof, id, &(sent as u64).to_le_bytes());
                eof = true;
            }
            let (kind, stream, payload) = self.frame();
            match kind {
                Kind::Opened => done.opened = serde_json::from_slice(&payload).expect("JSON"),
                Kind::Data => {
                    let to = if stream == id { &mut done.out } else { &mut done.err };
                    to.extend_from_slice(&payload);
                    let held = to.len();
                    self.credit(stream, held);
                }
                Kind::Credit => limit = u64::from_le_bytes(payload[8..].try_into().expect("8")) as usize,
                Kind::End if stream == id => {
                    done.end = serde_json::from_slice(&payload).expect("JSON");
                    self.send(Kind::Confirm, id, b"");
                    return done;
                }
                _ => {}
            }
        }
    }

    pub fn exec(&mut self, argv: &[&str]) -> Done {
        let stderr = self.next + 2;
        self.run(json!({"op": "exec", "command": "c", "argv": argv, "stderr_stream": stderr}), None)
    }

    pub fn exec_with(&mut self, mut ask: Value, input: Option<&[u8]>) -> Done {
        ask["op"] = "exec".into();
        ask["command"] = "c".into();
        ask["stdin"] = input.is_some().into();
        self.run(ask, input)
    }
}
