//! `cloche-convert PATH_OF_MKFS_EROFS`: one job over descriptor 0, then the end.

use cloche_convert::image::{self, Files};
use cloche_convert::protocol::{self, Job};
use cloche_convert::{child, index, lock_down, upper};
use std::ffi::CString;
use std::fs::File;
use std::os::unix::ffi::OsStringExt;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cloche-convert: {error}");
            ExitCode::from(2)
        }
    }
}

fn run() -> std::io::Result<()> {
    let program = std::env::args_os().nth(1).unwrap_or_default().into_vec();
    let program = CString::new(program)?;
    let (job, mut files) = protocol::receive()?;
    lock_down::begin(job.limits().seconds)?;
    match job {
        Job::Image { layers, limits, agent_mode } => {
            let blobs = files.split_off(3);
            let [output, scratch, agent] = take(files)?;
            let mkfs = child::start(&program, &output)?;
            let files = Files { output, scratch, agent, layers: blobs };
            answer(image::run(files, &layers, &limits, agent_mode, mkfs));
        }
        Job::Upper { limits, compression, drop } => {
            let [output, input] = take(files)?;
            let spool = upper::spool()?;
            answer(upper::run(&output, input, spool, compression, &drop, &limits));
        }
        Job::Index { limits, hash } => {
            let [output, input] = take(files)?;
            answer(index::run(&output, input, hash, &limits));
        }
    }
    Ok(())
}

fn take<const COUNT: usize>(files: Vec<File>) -> std::io::Result<[File; COUNT]> {
    files.try_into().map_err(|_| std::io::Error::other("wrong number of descriptors"))
}

fn answer<D: serde::Serialize>(outcome: cloche_convert::refusal::Outcome<D>) {
    match outcome {
        Ok(done) => protocol::done(&done),
        Err(refusal) => protocol::refused(&refusal),
    }
}
