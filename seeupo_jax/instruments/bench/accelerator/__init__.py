"""Everything that only an accelerator can show, in pieces, each a process of its own."""
