-- Items that were written together, as they were then. A row of `items` is later than a block.
CREATE TABLE item_blocks (
    run INTEGER NOT NULL,
    step_id TEXT NOT NULL,
    block INTEGER NOT NULL,         -- the number of its first item, divided by the size of a block
    first INTEGER NOT NULL,
    states BLOB NOT NULL,           -- a JSON array: the state of the first item, of the next one …
    PRIMARY KEY (run, step_id, block)
) STRICT, WITHOUT ROWID;
