"""Group servers: each serves a group of workers, and all exchange updates."""
