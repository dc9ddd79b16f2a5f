//! What the end-to-end tests need: the running lab, a namespace per test, and patient questions.
//!
//! The tests run inside the lab (`tests/lab/lab enter -- …`), against its real API server, and one at a time:
//! they share its simulated cards.

pub mod lab;
pub mod pods;
pub mod scope;

pub use lab::Lab;
pub use scope::Scope;
