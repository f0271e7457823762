"""From trajectory groups to padded, sharded and packed arrays. numpy only; knows no model and no process group."""
