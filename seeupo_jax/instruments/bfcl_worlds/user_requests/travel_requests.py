"""Requests to the travel agency."""

from __future__ import annotations

from typing import Any

from seeupo_jax.instruments.bfcl_worlds import world_words as words
from seeupo_jax.instruments.bfcl_worlds.draft import Draft, Infeasible, UserMessage, requests
from seeupo_jax.instruments.bfcl_worlds.scenarios import TRAVEL

CLASSES = ("economy", "business", "first")
INSURANCES = ("luggage", "medical", "cancellation", "delay")
MONEY = ("EUR", "GBP", "CAD", "AUD", "RMB", "MXN")
COMPLAINTS = (
    *("My seat has no window.", "I need a meal without nuts.", "The gate is not on my ticket."),
    *("I travel with a cello.", "May I board first?", "My name is spelled with two l."),
)


def token(draft: Draft) -> tuple[str, str]:
    """Returns the access token, and the user's note about it when it is first needed."""
    agency = draft.simulator(TRAVEL)
    if agency.access_token is None:
        client, secret = words.password(draft.rng), words.password(draft.rng)
        refresh, first, last = (
            words.password(draft.rng),
            agency.user_first_name,
            agency.user_last_name,
        )
        draft.call(
            "authenticate_travel",
            client_id=client,
            client_secret=secret,
            refresh_token=refresh,
            grant_type="read_write",
            user_first_name=first,
            user_last_name=last,
        )
        draft.set_fact("token", True)
        return agency.access_token, (
            f" Authenticate me for travel with client ID '{client}', secret '{secret}', refresh"
            f" token '{refresh}', grant type 'read_write', as {first} {last}."
        )
    if "token" in draft.facts:
        return agency.access_token, ""
    draft.set_fact("token", True)
    return agency.access_token, f" My travel token is '{agency.access_token}'."


def _card(draft: Draft) -> str:
    """Draws one of the user's cards; long contexts also have cards of other people."""
    agency = draft.simulator(TRAVEL)
    owner = f"{agency.user_first_name} {agency.user_last_name}"
    cards = agency.credit_card_list.items()
    return draft.choose([key for key, card in cards if card.get("cardholder_name") == owner])


def _route(draft: Draft) -> dict[str, Any]:
    """Draws two airports with a flight between them, a day and a class."""
    agency = draft.simulator(TRAVEL)
    when, kind = words.date(draft.rng), draft.choose(CLASSES)
    for _ in range(20):
        start, end = draft.choose_two(list(words.AIRPORTS))
        route = {"travel_from": words.AIRPORTS[start], "travel_to": words.AIRPORTS[end]}
        route |= {"travel_date": when, "travel_class": kind}
        try:
            agency.get_flight_cost(**route)
        except ValueError:
            continue
        return {"start": start, "end": end, "route": route}
    raise Infeasible("no route")


def price_by_city(draft: Draft) -> UserMessage:
    route = _route(draft)
    draft.call("get_nearest_airport_by_city", location=route["start"])
    draft.call("get_nearest_airport_by_city", location=route["end"])
    draft.call("get_flight_cost", **route["route"])
    return draft.phrase(
        "What does a seat in {travel_class} class cost, {start} to {end}, {travel_date}? Look up"
        " the nearest airport of each city for it.",
        "Find the airports nearest to {start} and {end}, then what flying between them, in that"
        " direction, costs on {travel_date} in {travel_class} class.",
        partial="Find the airports nearest to {start} and {end}, then what flying between them, in"
        " that direction, costs in {travel_class} class.",
        detail="The day is {travel_date}.",
        **route,
        **route["route"],
    )


def price_by_code(draft: Draft) -> UserMessage:
    route = _route(draft)["route"]
    draft.call("get_flight_cost", **route)
    return draft.phrase(
        "How expensive is {travel_from} to {travel_to} on {travel_date}, {travel_class} class?",
        "Price of a seat in {travel_class} class, {travel_from} to {travel_to}, {travel_date}?",
        partial="How expensive is {travel_from} to {travel_to} on {travel_date}?",
        detail=("In {travel_class} class.", "I travel in {travel_class} class."),
        **route,
    )


def book(draft: Draft) -> UserMessage:
    key, note = token(draft)
    route, card = _route(draft)["route"], _card(draft)
    made = draft.call("book_flight", access_token=key, card_id=card, **route)
    draft.set_fact("booking", made["booking_id"])
    draft.set_fact("card", card)
    return draft.phrase(
        "Book {travel_from} to {travel_to}, {travel_date}, {travel_class} class, on card {card}.",
        "Card {card} pays for a flight: {travel_from} to {travel_to}, {travel_date}, in"
        " {travel_class} class.",
        partial=(
            "Book {travel_from} to {travel_to} in {travel_class} class, on card {card}.",
            "Card {card} pays for a flight: {travel_from} to {travel_to} in {travel_class} class.",
        ),
        detail=("I leave on {travel_date}.", "For {travel_date}."),
        note=note,
        card=card,
        **route,
    )


def budget(draft: Draft) -> UserMessage:
    key, note = token(draft)
    amount = draft.rng.randint(10, 80) * 100.0
    draft.call("set_budget_limit", access_token=key, budget_limit=amount)
    return draft.phrase(
        "Cap my travel budget at {amount:.0f} dollars.",
        "No more than {amount:.0f} dollars for travel: set that as the limit.",
        partial="Cap my travel budget.",
        detail="At {amount:.0f} dollars.",
        note=note,
        amount=amount,
    )


def budget_abroad(draft: Draft) -> UserMessage:
    key, note = token(draft)
    money, value = draft.choose(MONEY), draft.rng.randint(20, 90) * 100.0
    exchanged = draft.call(
        "compute_exchange_rate", base_currency=money, target_currency="USD", value=value
    )["exchanged_value"]
    draft.call("set_budget_limit", access_token=key, budget_limit=exchanged)
    return draft.phrase(
        "I can spend {value:.0f} {money} on travel. Exchange that to USD and make it my limit.",
        "Convert {value:.0f} {money} into USD, and set the result as my travel budget.",
        partial="Convert what I have in {money} into USD, and set the result as my travel budget.",
        detail="I have {value:.0f} {money}.",
        note=note,
        money=money,
        value=value,
    )


def exchange(draft: Draft) -> UserMessage:
    money, value = draft.choose(MONEY), draft.rng.randint(20, 900) * 10.0
    draft.call("compute_exchange_rate", base_currency="USD", target_currency=money, value=value)
    return draft.phrase(
        "How much are {value:.0f} USD in {money}?",
        "I get {money} for {value:.0f} USD: how many?",
        partial="How much are my {value:.0f} USD over there?",
        detail="In {money}, that is.",
        money=money,
        value=value,
    )


def register(draft: Draft) -> UserMessage:
    key, note = token(draft)
    agency = draft.simulator(TRAVEL)
    owner = f"{agency.user_first_name} {agency.user_last_name}"
    number = f"{draft.rng.randint(4000, 4999)}{draft.rng.randint(10**11, 10**12 - 1)}"
    until = f"{draft.rng.randint(1, 12):02}/{draft.rng.randint(2028, 2032)}"
    code = draft.rng.randint(100, 999)
    draft.call(
        "register_credit_card",
        access_token=key,
        card_number=number,
        expiration_date=until,
        cardholder_name=owner,
        card_verification_number=code,
    )
    return draft.phrase(
        "Register a card: {number}, good until {until}, in the name of {owner}, code {code}.",
        "I have a new card, {number}. It expires {until}, {owner} owns it, and {code} verifies it.",
        partial="Register a card: {number}, good until {until}, in the name of {owner}.",
        detail=("The code is {code}.", "Verification number {code}."),
        note=note,
        number=number,
        until=until,
        owner=owner,
        code=code,
    )


def card_balance(draft: Draft) -> UserMessage:
    key, note = token(draft)
    card = _card(draft)
    draft.call("get_credit_card_balance", access_token=key, card_id=card)
    return draft.phrase(
        "What is left on card {card}?",
        "Tell me the balance of the card with ID {card}.",
        partial="Tell me the balance of one of my cards.",
        detail="The ID is {card}.",
        note=note,
        card=card,
    )


def verify(draft: Draft) -> UserMessage:
    agency = draft.simulator(TRAVEL)
    first, last = agency.user_first_name, agency.user_last_name
    born = words.date(draft.rng, 1955, 1999)
    number = f"US{draft.rng.randint(10**6, 10**7 - 1)}"
    draft.call(
        "verify_traveler_information",
        first_name=first,
        last_name=last,
        date_of_birth=born,
        passport_number=number,
    )
    return draft.phrase(
        "Is my traveller data fine? {first} {last}, born {born}, passport {number}.",
        "Verify me as a traveller: {first} {last}, passport {number}, date of birth {born}.",
        partial="Verify me as a traveller: {first} {last}, date of birth {born}.",
        detail="My passport is {number}.",
        first=first,
        last=last,
        born=born,
        number=number,
    )


def airport(draft: Draft) -> UserMessage:
    city = draft.choose(list(words.AIRPORTS))
    draft.call("get_nearest_airport_by_city", location=city)
    return draft.phrase(
        "Which airport is closest to {city}?",
        "I have to fly out of {city}. What is the airport there?",
        partial="I have to fly out of my home town. What is the airport there?",
        detail="I live in {city}.",
        city=city,
    )


def cards(draft: Draft) -> UserMessage:
    draft.call("get_all_credit_cards")
    return draft.phrase("Which cards of mine does the agency have?", "Show me my registered cards.")


def invoice(draft: Draft) -> UserMessage:
    key, note = token(draft)
    draft.call("retrieve_invoice", access_token=key, booking_id=draft.fact("booking"))
    return draft.phrase(
        "I need the invoice of the flight that you booked last.",
        "Get the invoice for my newest booking.",
        note=note,
    )


def insure(draft: Draft) -> UserMessage:
    key, note = token(draft)
    kind, cost = draft.choose(INSURANCES), draft.rng.randint(5, 40) * 10.0
    draft.call(
        "purchase_insurance",
        access_token=key,
        insurance_type=kind,
        booking_id=draft.fact("booking"),
        insurance_cost=cost,
        card_id=draft.fact("card"),
    )
    return draft.phrase(
        "Insure my newest booking on the same card: type '{kind}', for {cost:.0f} dollars.",
        "'{kind}' insurance for the flight you booked last: {cost:.0f} dollars on the same card.",
        partial="Insure my newest booking on the same card for {cost:.0f} dollars.",
        detail="Of the type '{kind}'.",
        note=note,
        kind=kind,
        cost=cost,
    )


def complain(draft: Draft) -> UserMessage:
    text = draft.choose(COMPLAINTS)
    draft.call("contact_customer_support", booking_id=draft.fact("booking"), message=text)
    return draft.phrase(
        "Write to customer support about my newest booking: '{text}'",
        "Support should hear about the flight you booked last: '{text}'",
        partial="Support should hear from me about the flight you booked last.",
        detail="Tell them '{text}'",
        text=text,
    )


def cancel(draft: Draft) -> UserMessage:
    key, note = token(draft)
    draft.call("cancel_booking", access_token=key, booking_id=draft.fact("booking"))
    del draft.facts["booking"]
    return draft.phrase(
        "I cannot travel after all, so cancel my newest booking.",
        "Cancel the flight that you booked last.",
        note=note,
    )


def history(draft: Draft) -> UserMessage:
    draft.fact("booking")
    key, note = token(draft)
    draft.call("get_booking_history", access_token=key)
    return draft.phrase("What have I booked so far?", "List all my bookings.", note=note)


TRAVEL_REQUESTS = (
    *requests((TRAVEL,), price_by_city, price_by_code, book, budget, budget_abroad, exchange),
    *requests((TRAVEL,), register, card_balance, verify, airport, cards),
    *requests((TRAVEL,), invoice, insure, complain, cancel, history, follows="booking"),
)
