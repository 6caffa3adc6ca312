"""The vocabulary of generated worlds and requests: names, files, titles, sentences."""

from __future__ import annotations

from random import Random

FIRST_NAMES = (
    *("Ottilie", "Bram", "Yusra", "Cosimo", "Imke", "Tariq", "Svea", "Noor", "Wren", "Iolo"),
    *(
        "Marit",
        "Dov",
        "Zofia",
        "Emeka",
        "Linnea",
        "Kasimir",
        "Haruto",
        "Paloma",
        "Anselm",
        "Bettina",
    ),
    *("Ciro", "Dagny", "Ewa", "Farouk", "Gudrun", "Hektor", "Ines", "Joost", "Keala", "Lorcan"),
)
LAST_NAMES = (
    *(
        "Vandermeer",
        "Okonjo",
        "Lindqvist",
        "Abelard",
        "Castellan",
        "Duarte",
        "Fenwick",
        "Grabowski",
    ),
    *("Haldane", "Iwasaki", "Jurado", "Kestrel", "Lomax", "Moreau", "Nakasone", "Ostrander"),
)
HANDLES = (
    *(
        "tidewatcher",
        "breadbard",
        "mosslight",
        "kilnandclay",
        "slowferry",
        "orchardhand",
        "loomworks",
    ),
    *("quietcomet", "papercrane9", "saltmarsh", "northlamp", "ridgewalk", "beeyard", "inkpot_ida"),
    *("cellodad", "wintergarden", "rustybellows", "paperboats", "stonesoup", "lanternkeeper"),
)
FOLDERS = (
    *("harvest", "kiln", "orchard", "atlas", "looms", "greenhouse", "quarry", "tides", "choir"),
    *("apiary", "bindery", "cellar", "dockyard", "ferry", "glasshouse", "herbarium", "mill"),
    *("observatory", "pantry", "rookery", "sawmill", "tannery", "vineyard", "workshop", "attic"),
)
NEW_FOLDERS = (
    *("shelf", "drawer", "for_ottilie", "to_sort", "keepers", "spring_batch", "second_look"),
    *("set_aside", "handover", "boxed_up", "parked", "old_versions", "to_print", "winter_batch"),
)
FILE_STEMS = (
    *(
        "seed_order",
        "kiln_log",
        "rainfall",
        "ferry_times",
        "bread_list",
        "loan_sheet",
        "paint_codes",
    ),
    *(
        "boiler_check",
        "hive_notes",
        "trail_map",
        "quilt_plan",
        "rota",
        "window_sizes",
        "tool_loans",
    ),
    *(
        "spice_count",
        "lamp_stock",
        "choir_parts",
        "tide_table",
        "grafting",
        "cider_press",
        "wool_dye",
    ),
    *("bell_ringers", "roof_survey", "canoe_hire", "stove_parts", "jam_labels", "gate_keys"),
)
NEW_STEMS = (
    *("wrap_up", "shortlist", "gleanings", "recap", "leftovers", "picks", "digest", "second_draft"),
    *("reminder", "open_points", "handout", "headcount", "corrections", "agenda_items"),
)
EXTENSIONS = ("txt", "md", "log", "csv")
SUBJECTS = (
    *(
        "The north gate",
        "Our oldest kiln",
        "The evening ferry",
        "A crate of pears",
        "The bell rope",
    ),
    *("The spare boiler", "Every second hive", "The copper press", "The upper meadow", "Her loom"),
    *("The lamp oil", "One roof tile", "The cider barrel", "A sack of barley", "The tide gauge"),
)
PREDICATES = (
    *(
        "needs a new hinge",
        "was checked on Tuesday",
        "stays shut until spring",
        "is two weeks late",
    ),
    *("belongs to the museum", "has been painted green", "costs more than planned", "is on loan"),
    *(
        "leaks after heavy rain",
        "goes to the lower barn",
        "was counted twice",
        "still smells of tar",
    ),
    *("waits for a signature", "moves to the east wall", "runs better than before"),
)
THINGS = (
    *("Badge reader", "Label printer", "Cold store alarm", "Meeting room screen", "Payroll export"),
    *("Warehouse scanner", "Guest network", "Coffee machine", "Bike shed lock", "Shift planner"),
    *("Lift in block C", "Archive search", "Parcel scale", "Door intercom", "Backup job"),
)
FAULTS = (
    *("rejects valid input", "stops at noon", "shows stale data", "will not restart"),
    *("makes a grinding noise", "forgets its settings", "is slower than usual", "beeps all night"),
    *("loses its connection", "prints blank pages", "asks for a licence"),
)
FIXES = (
    *("Replaced the power supply", "Restarted it and cleared the queue", "Swapped the cable"),
    *("Rolled back the last update", "Cleaned the sensor", "Renewed the licence"),
    *("Moved it to another port", "Reset it to the defaults", "Handed it to the supplier"),
)
TAGS = (
    "#slowcraft",
    "#harborlife",
    "#breadweek",
    "#nightsky",
    "#woodwork",
    "#riverside",
    "#mending",
)
ERRANDS = (
    *("the van is loaded", "lunch moves to noon", "the keys are under the blue pot"),
    *(
        "I will be ten minutes late",
        "the choir meets upstairs tonight",
        "your parcel is at my desk",
    ),
    *("the quote has been accepted", "we need two more chairs", "the plumber comes on Friday"),
    *("the train was on time", "please bring the long ladder", "the soup is in the fridge"),
)
KEYWORDS = ("ladder", "saddle", "kettle", "poster", "lantern", "harvest", "window", "ferry")
# Symbols of fictitious companies.
TICKERS = ("BRKN", "LUMO", "FERN", "OSPR", "TALC", "VIRE", "QUIL", "HALD", "PYRE", "JUNI", "COVE")
# Companies that the simulator knows by name; their prices are drawn as for all others.
COMPANIES = {
    "Zeta Corp": "ZETA",
    "Omega Industries": "OMEG",
    "Quasar Ltd.": "QUAS",
    "Neptune Systems": "NEPT",
    "Synex Solutions": "SYNX",
    "Apple": "AAPL",
    "Google": "GOOG",
    "Microsoft": "MSFT",
    "Nvidia": "NVDA",
}
# Cities of the travel simulator and their airports.
AIRPORTS = {
    **{"Rivermist": "RMS", "Stonebrook": "SBK", "Maplecrest": "MPC", "Silverpine": "SVP"},
    **{"Shadowridge": "SHD", "Sunset Valley": "SSV", "Oakendale": "OKD", "Willowbend": "WLB"},
    **{"Crescent Hollow": "CRH", "Autumnville": "ATV", "Pinehaven": "PHV", "Greenfield": "GFD"},
    **{"San Francisco": "SFO", "Los Angeles": "LAX", "New York": "JFK", "Chicago": "ORD"},
    **{"Boston": "BOS", "Hong Kong": "HKG", "Tokyo": "HND", "London": "LHR", "Paris": "CDG"},
}
# Pairs of cities between which the vehicle simulator knows the distance.
ROADS = (
    *(("Rivermist", "Stonebrook"), ("Maplecrest", "Silverpine"), ("Shadowridge", "Sunset Valley")),
    *(("Oakendale", "Willowbend"), ("Crescent Hollow", "Autumnville"), ("Silverpine", "Oakendale")),
    *(("San Francisco", "Rivermist"), ("San Francisco", "Silverpine")),
    ("Stonebrook", "San Francisco"),
)
STREETS = (
    "Tanner Lane",
    "Quay Street",
    "Millrace Road",
    "Juniper Close",
    "Ropewalk",
    "Hatter Row",
)


def sentence(rng: Random) -> str:
    return f"{rng.choice(SUBJECTS)} {rng.choice(PREDICATES)}"


def title(rng: Random) -> str:
    return f"{rng.choice(THINGS)} {rng.choice(FAULTS)}"


def person(rng: Random) -> str:
    return rng.choice(FIRST_NAMES)


def password(rng: Random) -> str:
    return f"{rng.choice(KEYWORDS)}-{rng.randint(100, 999)}"


def date(rng: Random, first: int = 2027, last: int = 2031) -> str:
    """Draws a day of these years as YYYY-MM-DD."""
    return f"{rng.randint(first, last)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
