//go:build tools

// Package tools pins the runc that the lab runs.
package tools

import _ "github.com/opencontainers/runc"
