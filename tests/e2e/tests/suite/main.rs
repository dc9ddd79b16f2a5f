//! The end-to-end suite: run by `make test` inside the lab, one test at a time.
//!
//! Each module is one part of the way of a pod; each test that reproduces a user's report names its id.

mod admission;
mod burst;
mod demo;
mod health;
mod identity;
mod kinds;
mod limits;
mod outage;
mod release;
mod scheduling;
mod storm;
mod traces;
mod two_controllers;
mod verbs;
