//! Writes `protocol/guest/vectors/*.json`, the golden bytes both sides decode:
//! `cargo run -p cloche-protocol --example vectors`. A test fails while the files differ.

#[path = "../tests/golden/mod.rs"]
mod golden;

fn main() -> std::io::Result<()> {
    let folder = golden::folder();
    std::fs::create_dir_all(&folder)?;
    for vector in golden::all() {
        std::fs::write(folder.join(format!("{}.json", vector.name)), vector.render())?;
    }
    Ok(())
}
