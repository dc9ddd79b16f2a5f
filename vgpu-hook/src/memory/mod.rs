//! Memory: what each family of allocations charges, and what it gives back.
