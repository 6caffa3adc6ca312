"""Requests that carry data from one simulator to another."""

from __future__ import annotations

from typing import Any

from seeupo_jax.instruments.bfcl_worlds.draft import Draft, UserMessage, requests
from seeupo_jax.instruments.bfcl_worlds.scenarios import (
    FILES,
    MATH,
    MESSAGES,
    POSTS,
    TICKETS,
    TRADING,
    TRAVEL,
    VEHICLE,
)
from seeupo_jax.instruments.bfcl_worlds.user_requests import (
    file_requests,
    message_requests,
    post_requests,
    ticket_requests,
    trading_requests,
)

WHEELS = {
    **{"front left": "frontLeftTirePressure", "front right": "frontRightTirePressure"},
    **{"rear left": "rearLeftTirePressure", "rear right": "rearRightTirePressure"},
}


def _send(draft: Draft, text: str) -> dict[str, Any]:
    """Sends a message to a colleague; returns the values for the request's phrasing."""
    note = message_requests.sign_in(draft)
    name, key = message_requests.find_colleague(draft)
    draft.call("send_message", receiver_id=key, message=text)
    draft.set_fact("receiver", key)
    return {"note": note, "name": name}


def _tweet(draft: Draft, text: str) -> dict[str, Any]:
    note = post_requests.sign_in(draft)
    draft.set_fact("tweet", draft.call("post_tweet", content=text)["id"])
    return {"note": note}


def _file_ticket(draft: Draft, title: str, **rest: Any) -> dict[str, Any]:
    note = ticket_requests.sign_in(draft)
    draft.set_fact("ticket", draft.call("create_ticket", title=title, **rest)["id"])
    return {"note": note}


def _last_line(draft: Draft) -> tuple[str, dict[str, Any]]:
    place = file_requests.go_somewhere(draft)
    name = file_requests.some_file(draft)
    line = draft.call("tail", file_name=name, lines=1)["last_lines"]
    return line, {"file": name, "place": place}


def tweet_last_line(draft: Draft) -> UserMessage:
    line, values = _last_line(draft)
    return draft.phrase(
        "Tweet the last line of '{file}' word for word. The file is {place}.",
        "Get the closing line of '{file}', {place}, and put it out as a tweet, nothing added.",
        partial="Get the closing line of a file {place} and put it out as a tweet, nothing added.",
        detail="The file's name is '{file}'.",
        **values,
        **_tweet(draft, line),
    )


def send_last_line(draft: Draft) -> UserMessage:
    line, values = _last_line(draft)
    return draft.phrase(
        "{name} asked for the last line of '{file}', {place}. Look up the user ID and send it.",
        "Send the bare last line of '{file}', {place}, to {name}; you have to look up the ID.",
        partial="A colleague asked for the last line of '{file}', {place}. Look up the user ID and"
        " send it.",
        detail="It was {name} who asked.",
        **values,
        **_send(draft, line),
    )


def report_file(draft: Draft) -> UserMessage:
    place = file_requests.go_somewhere(draft)
    name = file_requests.some_file(draft)
    text = draft.call("cat", file_name=name)["file_content"]
    priority = draft.rng.randint(2, 5)
    return draft.phrase(
        "Read '{file}' {place} and file a ticket titled '{file}' with that text as description,"
        " priority {priority}.",
        "'{file}' {place} holds a complaint. Open a ticket under the file's name whose description"
        " is all of its text, at priority {priority}.",
        partial="Read '{file}' {place} and file a ticket titled '{file}' with that text as"
        " description.",
        detail="Priority {priority}.",
        file=name,
        place=place,
        priority=priority,
        **_file_ticket(draft, name, description=text, priority=priority),
    )


def note_ticket(draft: Draft) -> UserMessage:
    ticket = ticket_requests.some_ticket(draft)
    title = draft.call("get_ticket", ticket_id=ticket["id"])["title"]
    name = file_requests.new_name(draft)
    draft.call("touch", file_name=name)
    draft.call("echo", content=title, file_name=name)
    return draft.phrase(
        "Keep the title of ticket {number} in a new file '{name}' in the present folder.",
        "Look up what ticket {number} is titled; write only that into a fresh '{name}' here.",
        partial="Look up what ticket {number} is titled; write only that into a fresh file here.",
        detail="The file's name: '{name}'.",
        number=ticket["id"],
        name=name,
    )


def mean_of_counts(draft: Draft) -> UserMessage:
    place = file_requests.go_somewhere(draft, files=2)
    first, second = draft.choose_two(file_requests.file_names(file_requests.folder_now(draft)))
    counts = [draft.call("wc", file_name=name, mode="w")["count"] for name in (first, second)]
    draft.set_fact("figure", draft.call("mean", numbers=counts)["result"])
    return draft.phrase(
        "How many words do '{first}' and '{second}' have on average? Both are {place}.",
        "Count the words of '{first}' and of '{second}', {place}, and take their mean.",
        partial="Count the words of '{first}' and of another file, {place}, and take their mean.",
        detail="The other one is '{second}'.",
        first=first,
        second=second,
        place=place,
    )


def share_of_lines(draft: Draft) -> UserMessage:
    place = file_requests.go_somewhere(draft, files=2)
    first, second = draft.choose_two(file_requests.file_names(file_requests.folder_now(draft)))
    part, whole = (draft.call("wc", file_name=n, mode="c")["count"] for n in (first, second))
    draft.set_fact("figure", draft.call("percentage", part=part, whole=whole)["result"])
    return draft.phrase(
        "What percentage of the characters of '{second}' does '{first}' have? Look {place}.",
        "Count the characters of '{first}' and '{second}' {place}: the first is which percentage"
        " of the other?",
        first=first,
        second=second,
        place=place,
    )


def save_price(draft: Draft) -> UserMessage:
    symbol = trading_requests.symbol_of(draft)
    price = draft.call("get_stock_info", symbol=symbol)["price"]
    name = file_requests.new_name(draft)
    draft.call("touch", file_name=name)
    draft.call("echo", content=f"{symbol} {price}", file_name=name)
    return draft.phrase(
        "Put the price of {symbol} into a new file '{name}' here, as '{symbol} PRICE'.",
        "Look up {symbol}; a fresh file '{name}' here should say '{symbol} PRICE' with its price.",
        symbol=symbol,
        name=name,
    )


def send_price(draft: Draft) -> UserMessage:
    symbol = trading_requests.symbol_of(draft)
    price = draft.call("get_stock_info", symbol=symbol)["price"]
    return draft.phrase(
        "Find out the price of {symbol} and {name}'s user ID, and write '{symbol} is at PRICE'"
        " with the price put in.",
        "{name} wants to know what {symbol} costs. Look up both the price and the ID, then send"
        " '{symbol} is at PRICE', filled in.",
        partial="{name} wants to know what a stock costs. Look up both the price and the ID, then"
        " send 'SYMBOL is at PRICE', filled in.",
        detail="The stock is {symbol}.",
        symbol=symbol,
        **_send(draft, f"{symbol} is at {price}"),
    )


def tweet_price(draft: Draft) -> UserMessage:
    symbol = trading_requests.symbol_of(draft)
    price = draft.call("get_stock_info", symbol=symbol)["price"]
    return draft.phrase(
        "Tweet '{symbol} now at PRICE', with its real price for the last word.",
        "Look up {symbol}, then tweet '{symbol} now at PRICE' and fill in the price.",
        symbol=symbol,
        **_tweet(draft, f"{symbol} now at {price}"),
    )


def report_order(draft: Draft) -> UserMessage:
    number = draft.fact("order")
    priority = draft.rng.randint(2, 5)
    return draft.phrase(
        "I want help with the order that you placed last: file a ticket 'Order NUMBER' with its"
        " number, priority {priority}, without a description.",
        "Open a ticket of priority {priority} for my newest order. The title is 'Order NUMBER'"
        " with the number filled in, and there is no description.",
        priority=priority,
        **_file_ticket(draft, f"Order {number}", priority=priority),
    )


def mean_price(draft: Draft) -> UserMessage:
    first, second = draft.choose_two([*draft.simulator(TRADING).stocks])
    prices = [draft.call("get_stock_info", symbol=symbol)["price"] for symbol in (first, second)]
    draft.set_fact("figure", draft.call("mean", numbers=prices)["result"])
    return draft.phrase(
        "What do {first} and {second} cost on average?",
        "Look up {first} and {second} and give me the mean of their prices.",
        partial="Look up {first} and one more stock and give me the mean of their prices.",
        detail="The other stock is {second}.",
        first=first,
        second=second,
    )


def value_of_shares(draft: Draft) -> UserMessage:
    symbol, amount = trading_requests.symbol_of(draft), draft.rng.randint(3, 60)
    price = draft.call("get_stock_info", symbol=symbol)["price"]
    draft.set_fact("figure", draft.call("multiply", a=price, b=amount)["result"])
    return draft.phrase(
        "I own {amount} shares of {symbol}. Look up the price and multiply: what are they worth?",
        partial="Look up {symbol} and multiply its price: what are my shares worth?",
        detail="I own {amount}.",
        symbol=symbol,
        amount=amount,
    )


def _booking(draft: Draft) -> tuple[str, dict[str, Any]]:
    number = draft.fact("booking")
    return number, draft.simulator(TRAVEL).booking_record[number]


def send_booking(draft: Draft) -> UserMessage:
    number, _ = _booking(draft)
    return draft.phrase(
        "{name} travels along: look up the user ID and send 'Booking NUMBER', with the ID of my"
        " newest booking filled in.",
        "Tell {name} 'Booking NUMBER', NUMBER being the ID of the flight you booked last. The"
        " user ID has to be looked up.",
        **_send(draft, f"Booking {number}"),
    )


def tweet_trip(draft: Draft) -> UserMessage:
    _, record = _booking(draft)
    start, end = record["travel_from"], record["travel_to"]
    return draft.phrase(
        "Tweet where my newest booking goes, as 'FROM to TO' with the two airport codes.",
        **_tweet(draft, f"{start} to {end}"),
    )


def report_booking(draft: Draft) -> UserMessage:
    number, _ = _booking(draft)
    priority = draft.rng.randint(2, 5)
    return draft.phrase(
        "File a ticket about my newest booking: title 'Booking NUMBER' with its ID, priority"
        " {priority}, no description.",
        "The flight you booked last needs a ticket, 'Booking NUMBER' with the ID filled in, at"
        " priority {priority} and without a description.",
        partial="File a ticket about my newest booking: title 'Booking NUMBER' with its ID, no"
        " description.",
        detail="Priority {priority}.",
        priority=priority,
        **_file_ticket(draft, f"Booking {number}", priority=priority),
    )


def split_fare(draft: Draft) -> UserMessage:
    draft.need_unpadded_answers()
    _, record = _booking(draft)
    route = {k: record[k] for k in ("travel_from", "travel_to", "travel_date", "travel_class")}
    cost = draft.call("get_flight_cost", **route)["travel_cost_list"][0]
    people = draft.rng.randint(3, 7)
    draft.set_fact("figure", draft.call("divide", a=cost, b=people)["result"])
    return draft.phrase(
        "Ask for the flight cost of my newest booking once more and divide it by {people}.",
        "{people} of us share my newest booking. Ask for its flight cost: what does each pay?",
        partial="We share my newest booking. Ask for its flight cost: what does each pay?",
        detail="There are {people} of us.",
        people=people,
    )


def tweet_pressure(draft: Draft) -> UserMessage:
    wheel = draft.choose([*WHEELS])
    value = draft.call("check_tire_pressure")[WHEELS[wheel]]
    return draft.phrase(
        "Check the tires, and tweet '{wheel} tire: VALUE psi' with the pressure there.",
        "How is the {wheel} tire? Put it out as a tweet, '{wheel} tire: VALUE psi', filled in.",
        wheel=wheel,
        **_tweet(draft, f"{wheel} tire: {value} psi"),
    )


def send_fuel(draft: Draft) -> UserMessage:
    fuel = draft.call("displayCarStatus", option="fuel")["fuelLevel"]
    return draft.phrase(
        "Read the fuel level and tell {name} 'Fuel: VALUE gallons' with it; look up the ID first.",
        "{name} drives next. Look up the user ID and the fuel level, and send 'Fuel: VALUE"
        " gallons', filled in.",
        partial="Somebody drives next. Look up the user ID and the fuel level, and send 'Fuel:"
        " VALUE gallons', filled in.",
        detail="{name} drives.",
        **_send(draft, f"Fuel: {fuel} gallons"),
    )


def report_pressure(draft: Draft) -> UserMessage:
    wheel, priority = draft.choose([*WHEELS]), draft.rng.randint(2, 5)
    value = draft.call("check_tire_pressure")[WHEELS[wheel]]
    return draft.phrase(
        "Check the tires and file a ticket 'Check {wheel} tire' of priority {priority}, whose"
        " description is that tire's pressure as 'VALUE psi'.",
        "The {wheel} tire worries me. Get the pressures; a ticket 'Check {wheel} tire' should"
        " describe it as 'VALUE psi', at priority {priority}.",
        wheel=wheel,
        priority=priority,
        **_file_ticket(draft, f"Check {wheel} tire", description=f"{value} psi", priority=priority),
    )


def mean_pressure(draft: Draft) -> UserMessage:
    pressures = draft.call("check_tire_pressure")
    numbers = [pressures[key] for key in WHEELS.values()]
    draft.set_fact("figure", draft.call("mean", numbers=numbers)["result"])
    return draft.phrase(
        "What is the mean pressure of my four tires?",
    )


def fuel_share(draft: Draft) -> UserMessage:
    fuel = draft.call("displayCarStatus", option="fuel")["fuelLevel"]
    draft.set_fact("figure", draft.call("percentage", part=fuel, whole=50)["result"])
    return draft.phrase(
        "The tank holds 50 gallons. How many percent of that are in it? Look at the fuel level.",
    )


def send_ticket(draft: Draft) -> UserMessage:
    number = draft.fact("ticket")
    return draft.phrase(
        "{name} should follow up: look up the user ID and send 'Ticket NUMBER', with the number of"
        " the ticket that you filed last.",
        "Pass the newest ticket on to {name} by the message 'Ticket NUMBER', filled in. The user"
        " ID you have to look up.",
        **_send(draft, f"Ticket {number}"),
    )


def tweet_ticket(draft: Draft) -> UserMessage:
    ticket = ticket_requests.some_ticket(draft)
    title = draft.call("get_ticket", ticket_id=ticket["id"])["title"]
    return draft.phrase(
        "Tweet the title of ticket {number} so that everyone is warned.",
        "Look up ticket {number} and make a tweet of its title, exactly as it stands.",
        number=ticket["id"],
        **_tweet(draft, title),
    )


def send_post(draft: Draft) -> UserMessage:
    number = draft.choose([*draft.simulator(POSTS).tweets])
    text = draft.call("get_tweet", tweet_id=number)["content"]
    return draft.phrase(
        "Fetch tweet {number} and send its text to {name}, whose user ID you have to look up.",
        "{name} has no account for tweets. Look up the user ID and pass on what tweet {number}"
        " says, word for word.",
        number=number,
        **_send(draft, text),
    )


CROSS_REQUESTS = (
    *requests((FILES, POSTS), tweet_last_line),
    *requests((FILES, MESSAGES), send_last_line),
    *requests((FILES, TICKETS), report_file, note_ticket),
    *requests((FILES, MATH), mean_of_counts, share_of_lines),
    *requests((FILES, TRADING), save_price),
    *requests((MESSAGES, TRADING), send_price),
    *requests((POSTS, TRADING), tweet_price),
    *requests((TICKETS, TRADING), report_order, follows="order"),
    *requests((MATH, TRADING), mean_price, value_of_shares),
    *requests((MESSAGES, TRAVEL), send_booking, follows="booking"),
    *requests((POSTS, TRAVEL), tweet_trip, follows="booking"),
    *requests((TICKETS, TRAVEL), report_booking, follows="booking"),
    *requests((MATH, TRAVEL), split_fare, follows="booking"),
    *requests((POSTS, VEHICLE), tweet_pressure),
    *requests((MESSAGES, VEHICLE), send_fuel),
    *requests((TICKETS, VEHICLE), report_pressure),
    *requests((MATH, VEHICLE), mean_pressure, fuel_share),
    *requests((MESSAGES, TICKETS), send_ticket, follows="ticket"),
    *requests((POSTS, TICKETS), tweet_ticket),
    *requests((MESSAGES, POSTS), send_post),
)
