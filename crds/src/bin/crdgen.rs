//! Writes the three `CustomResourceDefinition`s into a folder: `crdgen [FOLDER]`, by default this crate's own.

use std::path::PathBuf;
use std::process::ExitCode;

use mullion_crds::manifest::manifests;

fn main() -> ExitCode {
    let folder = std::env::args_os().nth(1).map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    let files = match manifests() {
        Ok(files) => files,
        Err(error) => {
            eprintln!("{}: {error}", error.code());
            return ExitCode::FAILURE;
        }
    };
    for (name, text) in files {
        let path = folder.join(name);
        if let Err(error) = std::fs::write(&path, text) {
            eprintln!("cannot write {}: {error}", path.display());
            return ExitCode::FAILURE;
        }
        println!("{}", path.display());
    }
    ExitCode::SUCCESS
}
