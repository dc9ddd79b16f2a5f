//! A simulated `libnvidia-ml.so.1` over the state file that `MULLION_FAKE_STATE` names.
//!
//! The entry points, their structs and their answers are those of the driver's library, so that a program
//! runs unchanged on either. No state file is no driver: init answers `DRIVER_NOT_LOADED`.
//!
//! An entry point is declared with `entry!`. It counts the call, waits the injected latency, answers
//! the injected error if one is due, and only then does its work on a snapshot of the node; a mutation goes
//! through the state file. Nothing here panics: a panic would end the program that loaded the library.
//!
//! Programs that run on the simulated CUDA driver show up by themselves: their processes, their memory and how busy they keep the
//! cards come out of the live file beside the state file. `FAKE_NVML_RECURSE=1` has `nvmlInit_v2` go through
//! `nvmlInitWithFlags` of the program's global scope, as some drivers do.
//!
//! A process is listed from its first context or allocation on, with all that it has of the card at that moment.
//! `FAKE_NVML_PROCESSES` says how: by the pids of the caller's namespace, without those that are not in it (the
//! default); `host`: by other pids (here 2^22 more, which no process has); `none`: nobody; `unsized`: without their
//! memory (`NVML_VALUE_NOT_AVAILABLE`).

#![expect(non_snake_case, reason = "the names of the C interface")]

mod abi;
mod code;
mod compute_instance;
mod device;
mod events;
mod gpu_instance;
mod handles;
mod live;
mod session;
mod system;
mod topology;
mod usage;

/// Declares an exported entry point whose body gets the session of this call.
macro_rules! entry {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) |$session:pat_param| $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name($($arg: $ty),*) -> std::ffi::c_uint {
                $crate::session::call(stringify!($name), |$session| $body)
            }
        )*
    };
}
pub(crate) use entry;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use fake_state::calls::NAMES;

    /// A call that is not in the list is neither counted nor can an error be injected.
    #[test]
    fn every_entry_point_is_in_the_list_of_calls_and_the_other_way_round() {
        let sources = [
            include_str!("compute_instance.rs"),
            include_str!("device.rs"),
            include_str!("events.rs"),
            include_str!("gpu_instance.rs"),
            include_str!("system.rs"),
            include_str!("topology.rs"),
            include_str!("usage.rs"),
        ];
        let declared: BTreeSet<&str> = sources
            .iter()
            .flat_map(|s| s.split("fn nvml").skip(1))
            .map(|rest| rest.split('(').next().unwrap())
            .collect();
        let listed: BTreeSet<&str> = NAMES.iter().map(|n| n.strip_prefix("nvml").unwrap()).collect();
        assert_eq!(declared, listed);
    }
}
