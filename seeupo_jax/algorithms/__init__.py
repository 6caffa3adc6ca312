"""Pure maths of the algorithms: arrays and keyword scalars in, arrays out; no config, no mesh."""
