"""Random initial states of the simulators, one function each, in the official form."""

from __future__ import annotations

from random import Random
from typing import Any

from seeupo_jax.instruments.bfcl_worlds import world_words as words

FILES, MATH, MESSAGES = "GorillaFileSystem", "MathAPI", "MessageAPI"
POSTS, TICKETS, TRADING = "TwitterAPI", "TicketAPI", "TradingBot"
TRAVEL, VEHICLE = "TravelAPI", "VehicleControlAPI"
DOORS = ("driver", "passenger", "rear_left", "rear_right")


def _file(rng: Random, extension: str) -> dict[str, str]:
    count = rng.randint(3, 7)
    if extension == "csv":
        lines = [f"{word},{rng.randint(2, 90)}" for word in rng.sample(words.KEYWORDS, count)]
    else:
        lines = [words.sentence(rng) for _ in range(count)]
    return {"type": "file", "content": "\n".join(lines)}


def _files(rng: Random, stems: list[str], count: int) -> dict[str, Any]:
    kinds = [rng.choice(words.EXTENSIONS) for _ in range(count)]
    return {f"{stems.pop()}.{kind}": _file(rng, kind) for kind in kinds}


def _folder(contents: dict[str, Any]) -> dict[str, Any]:
    return {"type": "directory", "contents": contents}


def file_system(rng: Random) -> dict[str, Any]:
    """A root folder with files and folders; some of these contain a folder."""
    stems = rng.sample(words.FILE_STEMS, len(words.FILE_STEMS))
    root, *names = rng.sample(words.FOLDERS, 8)
    contents = _files(rng, stems, rng.randint(2, 3))
    for _ in range(rng.randint(2, 3)):
        inner = _files(rng, stems, rng.randint(2, 3))
        if rng.random() < 0.5:
            inner[names.pop()] = _folder(_files(rng, stems, rng.randint(1, 2)))
        contents[names.pop()] = _folder(inner)
    if rng.random() < 0.4:
        contents[names.pop()] = _folder({})
    return {"root": {root: _folder(contents)}}


def mathematics(_: Random) -> dict[str, Any]:
    return {}


def messages(rng: Random) -> dict[str, Any]:
    people = rng.sample(words.FIRST_NAMES, rng.randint(5, 7))
    ids = [f"USR{index:03}" for index in range(1, len(people) + 1)]
    sent = [{rng.choice(ids[1:]): rng.choice(words.ERRANDS)} for _ in range(rng.randint(2, 4))]
    return {
        "user_count": len(people),
        "user_map": dict(zip(people, ids, strict=True)),
        "inbox": sent,
        "message_count": len(sent),
        "current_user": ids[0] if rng.random() < 0.6 else None,
        "random_seed": rng.randint(1, 999999),
    }


def posts(rng: Random) -> dict[str, Any]:
    owner, *others = rng.sample(words.HANDLES, 6)
    authors = [rng.choice([owner, *others[:3]]) for _ in range(rng.randint(3, 6))]
    first = rng.randint(0, 40)
    return {
        "username": owner,
        "password": words.password(rng),
        "authenticated": rng.random() < 0.6,
        "tweets": {
            str(number): {
                "id": number,
                "username": author,
                "content": f"{words.sentence(rng)}.",
                "tags": rng.sample(words.TAGS, rng.randint(0, 2)),
                "mentions": [f"@{name}" for name in others[: rng.randint(0, 2)]],
            }
            for number, author in enumerate(authors, first)
        },
        "comments": {},
        "retweets": {},
        "following_list": others[2:],
        "tweet_counter": first + len(authors),
    }


def tickets(rng: Random) -> dict[str, Any]:
    owner, *others = rng.sample(words.FIRST_NAMES, 4)
    first = rng.randint(1000, 9000)
    queue = [
        {
            "id": first + index,
            "title": words.title(rng),
            "description": f"{words.sentence(rng)}.",
            "status": "Open" if index < 3 else rng.choice(("Open", "Closed", "Resolved")),
            "priority": rng.randint(1, 4),
            "created_by": owner if index < 3 else rng.choice(others),
        }
        for index in range(rng.randint(4, 6))
    ]
    counter = first + len(queue)
    return {
        "ticket_queue": rng.sample(queue, len(queue)),
        "ticket_counter": counter,
        "current_user": owner if rng.random() < 0.6 else None,
    }


def trading(rng: Random) -> dict[str, Any]:
    companies = rng.sample(sorted(words.COMPANIES.values()), 4)
    symbols = [*companies, *rng.sample(words.TICKERS, 4)]
    stocks = {symbol: _stock(rng) for symbol in symbols}
    first = rng.randint(2000, 9000)
    orders = {
        str(first + index): {
            "id": first + index,
            "order_type": rng.choice(("Buy", "Sell")),
            "symbol": symbol,
            "price": stocks[symbol]["price"],
            "amount": rng.randint(5, 60),
            "status": rng.choice(("Open", "Pending", "Completed")),
        }
        for index, symbol in enumerate(rng.sample(symbols, 3))
    }
    return {
        "orders": orders,
        "account_info": {
            "account_id": rng.randint(30000, 99999),
            "balance": rng.randint(40, 90) * 1000.0,
            "binding_card": rng.randint(4 * 10**15, 5 * 10**15),
        },
        "authenticated": rng.random() < 0.6,
        "market_status": "Open",
        "order_counter": first + len(orders),
        "stocks": stocks,
        "watch_list": rng.sample(symbols, 3),
        "transaction_history": [],
        "random_seed": rng.randint(1, 999999),
    }


def _stock(rng: Random) -> dict[str, float]:
    price = rng.randint(1100, 39900) / 100 + 0.01
    return {
        "price": round(price, 2),
        "percent_change": rng.randint(-90, 90) / 10,
        "volume": rng.randint(300, 4000) / 1000,
        "MA(5)": round(price * 1.01, 2),
        "MA(20)": round(price * 0.98, 2),
    }


def travel(rng: Random) -> dict[str, Any]:
    first, last = words.person(rng), rng.choice(words.LAST_NAMES)
    signed_in = rng.random() < 0.7
    cards = {
        str(rng.randint(10**11, 10**12 - 1)): {
            "card_number": f"{rng.randint(4000, 4999)}{rng.randint(10**11, 10**12 - 1)}",
            "expiration_date": f"{rng.randint(1, 12):02}/{rng.randint(2028, 2032)}",
            "cardholder_name": f"{first} {last}",
            "card_verification_number": rng.randint(100, 999),
            "balance": rng.randint(9, 30) * 1000.0,
        }
        for _ in range(2)
    }
    return {
        "credit_card_list": cards,
        "booking_record": {},
        "access_token": f"{rng.randint(16**7, 16**8 - 1):x}" if signed_in else None,
        "token_type": "Bearer" if signed_in else None,
        "token_expires_in": 3600 if signed_in else None,
        "token_scope": "read_write" if signed_in else None,
        "user_first_name": first,
        "user_last_name": last,
        "budget_limit": None,
        "random_seed": rng.randint(1, 999999),
    }


def vehicle(rng: Random) -> dict[str, Any]:
    locked = rng.sample(DOORS, rng.randint(0, 3))
    pressures = [rng.randint(26, 36) + 0.5 for _ in range(4)]
    return {
        "random_seed": rng.randint(1, 999999),
        "fuelLevel": rng.randint(4, 20) + 0.5,
        "batteryVoltage": rng.randint(118, 130) / 10 + 0.01,
        "engineState": "stopped",
        "doorStatus": {door: "locked" if door in locked else "unlocked" for door in DOORS},
        "acTemperature": 20.0,
        "fanSpeed": 50,
        "acMode": "auto",
        "humidityLevel": rng.randint(30, 60) + 0.5,
        "headLightStatus": "off",
        "parkingBrakeStatus": rng.choice(("released", "engaged")),
        "parkingBrakeForce": 0.0,
        "slopeAngle": 0.0,
        "brakePedalStatus": "released",
        "brakePedalForce": 0.0,
        "distanceToNextVehicle": rng.randint(30, 90) + 0.5,
        "cruiseStatus": "inactive",
        "destination": "None",
        "frontLeftTirePressure": pressures[0],
        "frontRightTirePressure": pressures[1],
        "rearLeftTirePressure": pressures[2],
        "rearRightTirePressure": pressures[3],
    }


SCENARIOS = {
    FILES: file_system,
    MATH: mathematics,
    MESSAGES: messages,
    POSTS: posts,
    TICKETS: tickets,
    TRADING: trading,
    TRAVEL: travel,
    VEHICLE: vehicle,
}
