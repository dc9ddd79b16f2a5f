//! Launches: each one pays for its time on the card before it goes to the driver.
