-- What is to be recorded about changes by hand: written with the change, removed when recorded.
CREATE TABLE notes (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    text TEXT NOT NULL,
    fence INTEGER NOT NULL
) WITHOUT ROWID;
