//! The built agent as an ordinary process on a socketpair. No mounts; users only as far as the tester's own.

#[path = "native/host.rs"]
mod host;

use cloche_protocol::Kind;
use host::{Done, Host};
use serde_json::{json, Value};
use std::time::{Duration, Instant};

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("text")
}

#[test]
fn commands_and_their_ends() {
    let mut host = Host::start();
    let done = host.exec(&["/bin/echo", "hi"]);
    assert_eq!((text(&done.out), &done.end["ok"]["code"]), ("hi\n", &json!(0)));
    assert_eq!(done.end["ok"]["stdout_bytes"], 3);
    assert!(done.opened["pid"].as_u64().is_some());
    let done = host.exec(&["sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!((text(&done.out), text(&done.err)), ("out\n", "err\n"));
    assert_eq!(done.end["ok"]["code"], 7);
    assert_eq!(host.exec(&["sh", "-c", "kill -9 $$"]).end["ok"]["signal"], 9);
    for (ask, code) in [
        (json!({"argv": ["no-such-program"]}), "not_found"),
        (json!({"argv": ["/etc/passwd"]}), "not_executable"),
        (json!({"argv": ["true"], "cwd": "/no/such/folder"}), "not_found"),
        (json!({"argv": ["true"], "user": "no-such-user"}), "no_such_user"),
        (json!({"argv": ["true"], "user": "64000"}), "no_such_user"),
        (json!({"argv": []}), "invalid"),
        (json!({"argv": ["true"], "privileges": "all"}), "invalid"),
    ] {
        assert_eq!(host.exec_with(ask.clone(), None).end["error"]["code"], code, "{ask}");
    }
    assert_eq!(host.run(json!({"op": "fly"}), None).end["error"]["code"], "unsupported");
}

#[test]
fn a_command_sees_only_what_it_should() {
    let mut host = Host::start();
    let done = host.exec_with(
        json!({"argv": ["sh", "-c", "echo $FROM_BIND $OWN $PWD; ls /proc/self/fd | wc -l; umask;
            grep -E 'SigIgn|SigBlk|NoNewPrivs|CapEff|CapPrm' /proc/self/status"],
            "env": {"OWN": "too"}, "cwd": "/usr", "umask": 0o077}),
        None,
    );
    let lines: Vec<&str> = text(&done.out).split_whitespace().collect();
    let expected = "yes too /usr 4 0077 SigBlk: 0000000000000000 SigIgn: 0000000000000000 \
        CapPrm: 0000000000000000 CapEff: 0000000000000000 NoNewPrivs: 1";
    assert_eq!(lines.join(" "), expected);
}

#[test]
fn stdin_and_large_output() {
    let mut host = Host::start();
    let bytes: Vec<u8> = (0..3_000_000u32).map(|n| (n * 7 % 251) as u8).collect();
    let done = host.exec_with(json!({"argv": ["cat"]}), Some(&bytes));
    assert!(done.out == bytes);
    assert_eq!(done.end["ok"]["code"], 0);
    let done = host.exec_with(json!({"argv": ["true"]}), Some(&bytes));
    assert_eq!(done.end["ok"]["code"], 0, "a command that reads nothing still ends");
}

#[test]
fn a_terminal() {
    let mut host = Host::start();
    let pty = json!({"rows": 33, "cols": 99, "term": "xterm"});
    let script = "stty -echo; echo ready $TERM; stty size; read x; stty size; echo got $x; cat; echo over";
    let id = host.open(json!({"op": "exec", "command": "t", "argv": ["sh", "-c", script], "pty": pty}));
    let mut out = Vec::new();
    while !text(&out).contains("33 99") {
        if let (Kind::Data, _, payload) = host.frame() {
            out.extend_from_slice(&payload);
        }
    }
    host.send(Kind::Tell, id, br#"{"resize": {"rows": 40, "cols": 120}}"#);
    let done = host.finish(id, Some(b"word\nunfinished"), Done { out, ..Done::default() });
    assert_eq!(text(&done.out), "ready xterm\r\n33 99\r\n40 120\r\ngot word\r\nunfinishedover\r\n");
    assert_eq!(done.end["ok"]["code"], 0);
}

#[test]
fn signals_and_abort() {
    let mut host = Host::start();
    let script = "trap 'exit 5' TERM; echo up; while :; do sleep 0.02; done";
    let id = host.open(json!({"op": "exec", "command": "s", "argv": ["sh", "-c", script]}));
    while host.frame().0 != Kind::Data {}
    host.send(Kind::Tell, id, br#"{"signal": 15, "group": false}"#);
    assert_eq!(host.finish(id, None, Done::default()).end["ok"]["code"], 5);
    let id =
        host.open(json!({"op": "exec", "command": "k", "argv": ["sh", "-c", "sleep 60 & echo up; wait"]}));
    while host.frame().0 != Kind::Data {}
    host.send(Kind::Abort, id, br#"{"reason": "test"}"#);
    assert_eq!(host.finish(id, None, Done::default()).end["ok"]["signal"], 9);
}

#[test]
fn a_background_child_does_not_hold_the_end() {
    let mut host = Host::start();
    let begin = Instant::now();
    let done = host.exec(&["sh", "-c", "sleep 3 & echo started"]);
    assert_eq!(text(&done.out), "started\n");
    let took = begin.elapsed();
    assert!(took >= Duration::from_millis(190) && took < Duration::from_secs(2), "{took:?}");
}

#[test]
fn the_same_command_starts_once() {
    let mut host = Host::start();
    let ask = json!({"op": "exec", "command": "once", "argv": ["echo", "x"]});
    let id = host.open(ask.clone());
    let ended = |host: &mut Host| loop {
        let (kind, _, payload) = host.frame();
        if kind == Kind::End {
            return payload;
        }
    };
    let first = ended(&mut host);
    host.send(Kind::Open, id, ask.to_string().as_bytes());
    assert_eq!(host.frame().0, Kind::Opened);
    assert_eq!(ended(&mut host), first);
}

#[test]
fn re_attach_in_mid_stream() {
    let mut host = Host::start();
    // Ten million bytes that differ everywhere.
    let script = "i=0; while [ $i -lt 20 ]; do seq -f %09.0f ${i}00000 ${i}49999; i=$((i+1)); done";
    let expected = std::process::Command::new("sh").args(["-c", script]).output().expect("sh").stdout;
    assert_eq!(expected.len(), 10_000_000);
    let id = host.open(json!({"op": "exec", "command": "r", "argv": ["sh", "-c", script]}));
    let mut log: Vec<u8> = Vec::new();
    let mut cuts = 0;
    while cuts < 5 {
        let (kind, stream, payload) = host.frame();
        if kind != Kind::Data || stream != id {
            continue;
        }
        log.extend_from_slice(&payload);
        if log.len() > (cuts + 1) * 1_500_000 {
            // The old daemon dies: what it had read and not logged is lost, and was not credited.
            log.truncate(log.len() - payload.len());
            cuts += 1;
            reattach(&mut host, id, log.len());
        }
        let held = log.len();
        host.credit(id, held);
    }
    let done = host.finish(id, None, Done { out: log, ..Done::default() });
    assert_eq!(done.end["ok"]["stdout_bytes"], 10_000_000);
    assert!(done.out == expected, "every byte once, in order");
}

/// A new daemon: half a frame of the old one, zeros, RESET; STATE; RESUME from what was logged.
fn reattach(host: &mut Host, id: u32, logged: usize) {
    use std::io::{Read, Write};
    host.socket.write_all(&[4, id as u8, 0, 0, 0, 0xff, 0, 0, 0, 1, 2, 3]).expect("half a frame");
    host.socket.write_all(&vec![0; 131_085]).expect("zeros");
    let nonce: [u8; 16] = std::array::from_fn(|n| (n as u8) ^ (logged as u8) | 0x40);
    host.send(Kind::Reset, 0, &nonce);
    let mut seen = Vec::new();
    let at = loop {
        let mut buffer = [0; 65_536];
        let count = host.socket.read(&mut buffer).expect("STATE in time");
        seen.extend_from_slice(&buffer[..count]);
        if let Some(at) = seen.windows(16).position(|window| window == nonce) {
            break at - 9;
        }
    };
    host.decoder = cloche_protocol::Decoder::new();
    host.decoder.push(&seen[at..]);
    let (kind, _, payload) = host.frame();
    assert_eq!(kind, Kind::State);
    let state: Value = serde_json::from_slice(&payload[16..]).expect("JSON");
    let stream = &state["streams"][id.to_string()];
    assert_eq!((&stream["op"], &stream["command"]), (&json!("exec"), &json!("r")));
    let (acked, sent) = (stream["acked"].as_u64().expect("n"), stream["sent"].as_u64().expect("n"));
    assert!(acked <= logged as u64 && logged as u64 <= sent);
    let resume = json!({"streams": {id.to_string(): {"logged": logged}}, "close": []}).to_string();
    host.send(Kind::Resume, 0, &[&nonce[..], resume.as_bytes()].concat());
}

#[test]
fn files_by_workers() {
    let mut host = Host::start();
    let base = format!("/tmp/cloche-guest-test-{}", std::process::id());
    let path = |name: &str| format!("{base}/{name}");
    let bytes: Vec<u8> = (0..2_000_000u32).map(|n| (n % 253) as u8).collect();
    let ok = |done: Done| {
        assert!(done.end["ok"].is_object(), "{}", done.end);
        done
    };
    let write = json!({"op": "file.write", "path": path("a/b"), "make_parents": true, "mode": 0o600});
    assert_eq!(ok(host.run(write, Some(&bytes))).end["ok"]["bytes"], 2_000_000);
    let done = ok(host.run(json!({"op": "file.read", "path": path("a/b")}), None));
    assert!(done.out == bytes && done.opened == json!({"size": 2_000_000, "mode": 0o600}));
    let stat = ok(host.run(json!({"op": "fs.stat", "path": path("a/b"), "follow": true}), None));
    assert_eq!(stat.end["ok"]["entry"]["type"], "file");
    ok(host.run(json!({"op": "fs.mkdir", "path": path("c/d"), "parents": true}), None));
    ok(host
        .run(json!({"op": "fs.move", "from": path("a/b"), "to": path("c/d/e"), "overwrite": false}), None));
    let list = ok(host.run(json!({"op": "fs.list", "path": base, "depth": 9}), None));
    assert_eq!(list.end["ok"]["entries"], 4);
    let tree = ok(host.run(json!({"op": "tree.read", "path": base}), None));
    let written =
        host.run(json!({"op": "tree.write", "path": path("copy"), "overwrite": false}), Some(&tree.out));
    assert_eq!(ok(written).end["ok"], json!({"files": 4, "errors": []}));
    let done =
        ok(host.run(json!({"op": "file.read", "path": path("copy/c/d/e"), "offset": 9, "length": 5}), None));
    assert_eq!(done.out, bytes[9..14]);
    assert_eq!(host.run(json!({"op": "fs.remove", "path": base}), None).end["error"]["code"], "not_empty");
    ok(host.run(json!({"op": "fs.remove", "path": base, "recursive": true}), None));
    assert_eq!(
        host.run(json!({"op": "file.read", "path": path("a")}), None).end["error"]["code"],
        "not_found"
    );
}

/// An archive that makes a link and then writes through it.
#[test]
fn an_archive_does_not_leave_its_folder() {
    use cloche_guest::tar::{write_end, write_header, Header, Kind as Entry};
    let mut host = Host::start();
    let base = format!("/tmp/cloche-guest-links-{}", std::process::id());
    let mut archive = Vec::new();
    for (name, kind, link) in [
        ("out", Entry::Symlink, base.as_str()),
        ("out/evil", Entry::File, ""),
        ("up", Entry::Symlink, ".."),
        ("up/evil", Entry::File, ""),
        ("../evil", Entry::File, ""),
        ("hard", Entry::HardLink, "../evil"),
        ("good", Entry::File, ""),
    ] {
        let (name, link) = (name.into(), link.into());
        let header = Header { name, kind, link, mode: 0o644, uid: 0, gid: 0, size: 0, mtime: 0 };
        write_header(&mut archive, &header).expect("memory");
    }
    write_end(&mut archive).expect("memory");
    let ask = json!({"op": "tree.write", "path": format!("{base}/in"), "overwrite": true});
    let done = host.run(ask, Some(&archive));
    assert_eq!(done.end["ok"]["files"], 3, "{}", done.end);
    assert_eq!(done.end["ok"]["errors"].as_array().expect("a list").len(), 4);
    let outside: Vec<_> =
        std::fs::read_dir(&base).expect("the folder").flatten().map(|e| e.file_name()).collect();
    assert_eq!(outside, ["in"]);
    std::fs::remove_dir_all(&base).expect("tidy");
}

#[test]
fn the_agent_ends_with_its_host() {
    let mut host = Host::start();
    let id = host.next_id();
    host.open(json!({"op": "exec", "command": "z", "argv": ["sleep", "60"]}));
    assert_eq!((host.frame().1, host.child.try_wait().expect("a child")), (id, None));
    host.socket.shutdown(std::net::Shutdown::Both).expect("hang up");
    assert!(host.child.wait().expect("a child").success());
}
