//! Bytes between streams and operations, and the end of an operation.

use crate::calls;
use crate::exec;
use crate::operation::{Command, Exit, Operation, Task, Worker};
use crate::serve::Agent;
use crate::wire;
use crate::{failure::Failure, pty};
use cloche_protocol::limits::DRAIN_AFTER_EXIT_MS;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// What one turn reads of a command that says little, and of a bulk writer.
const READ_BYTES: usize = 16_384;
const BULK_READ_BYTES: usize = 262_144;
/// After so much output a command is a bulk writer: a larger pipe and buffer, several reads a turn.
const BULK_AFTER_BYTES: u64 = 65_536;
const BULK_PIPE_BYTES: i32 = 1 << 20;
const RESULT_BYTES_MAX: usize = 1 << 20;

enum Read {
    Bytes(usize),
    Nothing,
    End,
}

fn read(fd: &impl AsRawFd, buffer: &mut [u8]) -> Read {
    // SAFETY: pointer and length describe the buffer.
    match unsafe { calls::read(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) } {
        0 => Read::End,
        count if count > 0 => Read::Bytes(count as usize),
        _ => match std::io::Error::last_os_error().raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR) => Read::Nothing,
            // EIO is how a terminal says that its last user has gone.
            _ => Read::End,
        },
    }
}

impl Agent {
    pub(crate) fn admit(&mut self, stream: u32, operation: Operation) {
        let takes_input = operation.input.is_some();
        self.operations.insert(stream, operation);
        if takes_input {
            self.session.want_input(stream);
            if self.is_connecting(stream) {
                return self.arm_input(stream);
            }
            // Data may have come with OPEN already.
            if !self.session.input(stream).is_empty() || self.session.input_is_over(stream) {
                self.take_input(stream);
            }
        } else {
            self.session.drop_input(stream);
        }
        self.arm_all(stream);
    }

    pub(crate) fn is_connecting(&self, id: u32) -> bool {
        matches!(self.operations.get(&id), Some(Operation { task: Task::Port(port), .. }) if port.connecting)
    }

    fn arm_input(&mut self, id: u32) {
        if let Some(input) = self.operations.get_mut(&id).and_then(|operation| operation.input.as_mut()) {
            input.arm(&self.poller, true);
        }
    }

    fn arm_all(&mut self, id: u32) {
        let Some(operation) = self.operations.get_mut(&id) else { return };
        for output in &mut operation.outputs {
            let room = self.session.room(output.stream) > 0;
            if let Some(source) = &mut output.source {
                source.arm(&self.poller, room);
            }
        }
        if let Task::Worker(worker) = &mut operation.task {
            if let Some(result) = &mut worker.result {
                result.arm(&self.poller, true);
            }
        }
    }

    /// The host takes more: of this stream, or of the command whose stderr it is.
    pub(crate) fn arm_outputs(&mut self, stream: u32) {
        let owner = self.session.owner_of(stream);
        self.arm_all(owner);
    }

    pub(crate) fn take_input(&mut self, id: u32) {
        if self.is_connecting(id) {
            // The host's first bytes wait until the connection is made.
            return;
        }
        let Some(operation) = self.operations.get_mut(&id) else { return };
        if let Task::Trust(_) = operation.task {
            return self.take_trust(id);
        }
        let Some(input) = &mut operation.input else { return self.session.drop_input(id) };
        loop {
            let bytes = self.session.input(id);
            if bytes.is_empty() {
                break;
            }
            // SAFETY: pointer and length describe `bytes`.
            let count = unsafe { calls::write(input.fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) };
            if count > 0 {
                operation.last_input_byte = bytes[count as usize - 1];
                self.session.taken(id, count as usize);
                continue;
            }
            match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::EAGAIN) => return input.arm(&self.poller, true),
                Some(libc::EINTR) => continue,
                // The reader has gone. The command may go on; the host's bytes are dropped.
                _ => {
                    self.close_input(id);
                    return self.session.drop_input(id);
                }
            }
        }
        input.arm(&self.poller, false);
        if self.session.input_is_over(id) {
            self.finish_input(id);
        }
    }

    fn finish_input(&mut self, id: u32) {
        let Some(operation) = self.operations.get_mut(&id) else { return };
        let Some(input) = &operation.input else { return };
        match &operation.task {
            Task::Command(command) if command.terminal => {
                if let Some(byte) = pty::end_of_input(&input.fd) {
                    // In an unfinished line the first one only hands the line over.
                    let marks = [byte; 2];
                    let count = if operation.last_input_byte == b'\n' { 1 } else { 2 };
                    // SAFETY: pointer and length describe `marks`. A full terminal has no reader anyway.
                    unsafe { calls::write(input.fd.as_raw_fd(), marks.as_ptr().cast(), count) };
                }
            }
            Task::Port(_) => {
                // SAFETY: no pointers.
                unsafe { libc::shutdown(input.fd.as_raw_fd(), libc::SHUT_WR) };
            }
            _ => {}
        }
        self.close_input(id);
        self.settle(id);
    }

    fn close_input(&mut self, id: u32) {
        let input = self.operations.get_mut(&id).and_then(|operation| operation.input.take());
        if let Some(input) = input {
            input.close(&self.poller);
        }
    }

    pub(crate) fn read_output(&mut self, id: u32, index: usize) {
        let Some(output) = self.operations.get_mut(&id).and_then(|o| o.outputs.get_mut(index)) else {
            return;
        };
        let Some(source) = &mut output.source else { return };
        let most = if output.bulk { BULK_READ_BYTES } else { READ_BYTES };
        if self.scratch.len() < most {
            self.scratch.resize(most, 0);
        }
        let mut total = 0;
        let ended = loop {
            let room = self.session.room(output.stream).min(most - total);
            if room == 0 {
                break false;
            }
            match read(&source.fd, &mut self.scratch[..room]) {
                Read::Bytes(count) => {
                    self.session.output(output.stream, &self.scratch[..count]);
                    total += count;
                }
                Read::Nothing => break false,
                Read::End => break true,
            }
            if !output.bulk {
                break false;
            }
        };
        if !output.bulk && self.session.output_bytes(output.stream) > BULK_AFTER_BYTES {
            output.bulk = make_bulk(&source.fd);
        }
        let room = self.session.room(output.stream) > 0;
        source.arm(&self.poller, room);
        if ended {
            let stream = output.stream;
            if let Some(source) = output.source.take() {
                source.close(&self.poller);
            }
            self.session.output_end(stream);
        }
        if total > 0 {
            self.postpone(id);
        }
        if ended {
            self.settle(id);
        }
    }

    /// A byte came after the exit: wait for another.
    fn postpone(&mut self, id: u32) {
        let Some(Operation { task: Task::Command(command), .. }) = self.operations.get_mut(&id) else {
            return;
        };
        if command.exit.is_some() {
            command.quiet_at = Some(Instant::now() + Duration::from_millis(DRAIN_AFTER_EXIT_MS));
        }
    }

    pub(crate) fn on_exit(&mut self, id: u32, exit: Exit) {
        let Some(operation) = self.operations.get_mut(&id) else { return };
        match &mut operation.task {
            Task::Command(command) => {
                command.exit = Some(exit);
                self.draining.insert(id);
                self.postpone(id);
            }
            // Its number may soon be another process's.
            Task::Worker(worker) => worker.pid = None,
            Task::Port(_) | Task::Trust(_) => {}
        }
        self.settle(id);
    }

    /// Commands that have exited, whose output others hold open, and which said nothing for 200 ms.
    pub(crate) fn stop_waiting_for_output(&mut self, now: Instant) {
        let ids: Vec<u32> = self.draining.iter().copied().collect();
        for id in ids {
            let Some(operation) = self.operations.get_mut(&id) else {
                self.draining.remove(&id);
                continue;
            };
            let Task::Command(Command { quiet_at: Some(quiet_at), .. }) = operation.task else { continue };
            if quiet_at > now {
                continue;
            }
            let open = operation.outputs.iter().filter(|output| output.source.is_some());
            // What the host does not take yet was not waited for: its silence is not the command's.
            if open.map(|output| output.stream).any(|stream| self.session.room(stream) == 0) {
                self.postpone(id);
                continue;
            }
            for output in &mut operation.outputs {
                if let Some(source) = output.source.take() {
                    source.close(&self.poller);
                    self.session.output_end(output.stream);
                }
            }
            self.settle(id);
        }
    }

    /// END, if nothing is missing for it.
    pub(crate) fn settle(&mut self, id: u32) {
        let Some(operation) = self.operations.get(&id) else { return };
        if !operation.outputs_are_over() {
            return;
        }
        let end = match &operation.task {
            Task::Command(command) => {
                let Some(exit) = &command.exit else { return };
                let stderr = operation.outputs.get(1).map_or(0, |o| self.session.output_bytes(o.stream));
                exec::end(command, exit, self.session.output_bytes(id), stderr)
            }
            Task::Worker(worker) => match &worker.end {
                Some(end) => end.clone(),
                None => return,
            },
            Task::Port(_) if operation.input.is_some() => return,
            Task::Port(_) => self.port_end(id),
            Task::Trust(_) => return,
        };
        self.session.end(id, end);
        self.drop_operation(id);
    }

    fn drop_operation(&mut self, id: u32) {
        self.draining.remove(&id);
        if let Some(operation) = self.operations.remove(&id) {
            operation.close(&self.poller);
        }
        if self.operations.is_empty() && self.scratch.len() > READ_BYTES {
            self.scratch = Vec::new();
        }
    }

    /// The stream is forgotten or closed: nobody waits for the rest.
    pub(crate) fn discard(&mut self, id: u32) {
        if let Some(operation) = self.operations.get(&id) {
            stop(operation);
        }
        self.drop_operation(id);
    }

    /// The host is gone: nothing that it started may outlive it.
    pub fn kill_all(&self) {
        if std::process::id() == 1 {
            // As PID 1, everything.
            exec::signal(1, libc::SIGKILL, true);
        }
        self.operations.values().for_each(stop);
    }

    /// SIGKILL for a command, which then ends as usual; anything else ends here.
    pub(crate) fn abort(&mut self, id: u32) {
        let Some(operation) = self.operations.get(&id) else { return };
        stop(operation);
        if matches!(operation.task, Task::Command(_)) {
            return;
        }
        let streams: Vec<u32> = operation.outputs.iter().map(|output| output.stream).collect();
        let end = self.aborted_end(id);
        for stream in streams {
            self.session.output_cut(stream);
            self.session.output_end(stream);
        }
        self.session.end(id, end);
        self.drop_operation(id);
    }

    fn aborted_end(&self, id: u32) -> Vec<u8> {
        match self.session.op_of(id) {
            // ABORT is how a watch ends well.
            Some("fs.watch") => crate::serve::ok("{}"),
            _ => Failure::new("aborted", "the caller ended it").end(),
        }
    }

    pub(crate) fn on_tell(&mut self, id: u32, payload: &[u8]) {
        let Some(Operation { task: Task::Command(command), outputs, .. }) = self.operations.get(&id) else {
            return;
        };
        let Ok(tell) = wire::parse::<wire::Tell>(payload) else { return };
        let Some(pid) = command.exit.is_none().then_some(command.pid) else { return };
        if let Some(signal) = tell.signal.filter(|signal| (1..=64).contains(signal)) {
            exec::signal(pid, signal, tell.group.unwrap_or(true));
        }
        let master = outputs.first().and_then(|output| output.source.as_ref());
        if let (Some(size), Some(master), true) = (&tell.resize, master, command.terminal) {
            // The terminal may be closing; then its size matters to nobody.
            let _ = pty::resize(&master.fd, size);
        }
    }

    /// A worker's words: one line when it has begun, one at its end.
    pub(crate) fn read_result(&mut self, id: u32) {
        let Some(Operation { task: Task::Worker(worker), .. }) = self.operations.get_mut(&id) else { return };
        let Some(result) = &worker.result else { return };
        let mut buffer = [0u8; 4096];
        match read(&result.fd, &mut buffer) {
            Read::Nothing => return,
            Read::Bytes(count) => worker.lines.extend_from_slice(&buffer[..count]),
            Read::End => {
                if worker.end.is_none() {
                    worker.end = Some(Failure::new("io", "the worker died").end());
                }
                if let Some(result) = worker.result.take() {
                    result.close(&self.poller);
                }
            }
        }
        let mut opened = None;
        while let Some(at) = worker.lines.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = worker.lines.drain(..=at).take(at).collect();
            match line.split_first() {
                Some((b'O', json)) => opened = String::from_utf8(json.to_vec()).ok(),
                Some((b'E', json)) => worker.end = Some(json.to_vec()),
                _ => {}
            }
        }
        worker.lines.truncate(RESULT_BYTES_MAX);
        if let Some(opened) = opened {
            self.session.opened(id, opened);
        }
        self.settle(id);
    }
}

fn stop(operation: &Operation) {
    match &operation.task {
        Task::Command(command) if command.exit.is_none() => exec::kill_session(command.pid),
        // It is our own code, and one that writes removes what is not whole.
        Task::Worker(Worker { pid: Some(pid), .. }) => exec::signal(*pid, libc::SIGTERM, false),
        _ => {}
    }
}

fn make_bulk(fd: &impl AsRawFd) -> bool {
    // SAFETY: fcntl on numbers. A terminal or socket refuses the size, and is non-blocking already.
    unsafe {
        libc::fcntl(fd.as_raw_fd(), libc::F_SETPIPE_SZ, BULK_PIPE_BYTES);
        let flags = libc::fcntl(fd.as_raw_fd(), libc::F_GETFL);
        flags >= 0 && libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) >= 0
    }
}
