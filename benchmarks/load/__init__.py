"""Load on HTTP servers: generators, sweeps over connections, replays of access logs."""
