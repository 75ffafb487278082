"""The texts of tasks/extraction.jsonl, by kind: what is said, the schema of it, and the JSON that says the same.

Every choice follows from SHA-256 of a fixed seed, the record's id and what is chosen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

SEED = "extraction 1"
MAX_ITEMS = 6

T = TypeVar("T")

FIRST = ("Mirela", "Tobin", "Saskja", "Orlo", "Fenna", "Idris", "Wanda", "Kasimir", "Nuala", "Bastien", "Yara", "Edvin")
LAST = (
    "Halvorsten",
    "Quillmere",
    "Okonbrand",
    "Tarrowby",
    "Vantorelli",
    "Greshunov",
    "Ashdowne",
    "Mbekwell",
    "Lindqvar",
)
FIRMS = ("Brightmoor Optics", "Tallow & Finch", "Kestrel Freight", "Nimbus Kilns", "Oakhaven Labs", "Redwater Tools")
TOWNS = ("Ostermark", "Vellbridge", "Port Sallow", "Grenholt", "Ashby Fell", "Lower Tarn", "Monteverro", "Kirkwynd")
STREETS = ("Harbour Lane", "Old Mill Road", "Lantern Street", "Weaver's Row", "Station Square", "Birch Avenue")
MONTHS = ("January", "March", "April", "June", "September", "October", "November")
MONTH_NUMBERS = {"January": 1, "March": 3, "April": 4, "June": 6, "September": 9, "October": 10, "November": 11}


class Choices:
    """Arbitrary but fixed choices of one record."""

    def __init__(self, name: str) -> None:
        self._name = name

    def number(self, purpose: str, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        digest = hashlib.sha256(f"{SEED}/{self._name}/{purpose}".encode()).hexdigest()
        return low + int(digest[:12], 16) % (high - low + 1)

    def one(self, purpose: str, values: Sequence[T]) -> T:
        """One of several."""
        return values[self.number(purpose, 0, len(values) - 1)]

    def some(self, purpose: str, values: Sequence[T], low: int, high: int) -> list[T]:
        """From `low` to `high` different ones, in an arbitrary order."""
        keyed = sorted(range(len(values)), key=lambda n: self.number(f"{purpose} {n}", 0, 2**40))
        return [values[n] for n in keyed[: self.number(f"{purpose} count", low, high)]]

    def yes(self, purpose: str) -> bool:
        """Heads or tails."""
        return self.number(purpose, 0, 1) == 1

    def person(self, purpose: str) -> str:
        """An invented name."""
        return f"{self.one(f'{purpose} first', FIRST)} {self.one(f'{purpose} last', LAST)}"


class Record(NamedTuple):
    """A text, the schema of what it says, and the expected JSON."""

    text: str
    schema: dict[str, Any]
    answer: dict[str, Any]


def obj(**properties: Any) -> dict[str, Any]:
    """A closed object whose properties are all required."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def listed(items: Mapping[str, Any], **more: int) -> dict[str, Any]:
    """An array; never a long one, so that no small model goes on listing for ever."""
    return {"type": "array", "items": dict(items), **more, "maxItems": MAX_ITEMS}


def enum(*values: str) -> dict[str, Any]:
    """One of these texts."""
    return {"type": "string", "enum": list(values)}


TEXT: dict[str, Any] = {"type": "string"}
NUMBER: dict[str, Any] = {"type": "number"}
INTEGER: dict[str, Any] = {"type": "integer"}
BOOLEAN: dict[str, Any] = {"type": "boolean"}


def and_list(words: Sequence[str], link: str = "and") -> str:
    """ "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {link} {words[-1]}"


def job(c: Choices, variant: int) -> Record:
    """A job posting."""
    title = c.one("title", ("Kiln Operator", "Data Analyst", "Freight Planner", "Lens Grinder", "Payroll Clerk"))
    firm, town, contact = c.one("firm", FIRMS), c.one("town", TOWNS), c.person("contact")
    level = c.one("level", ("junior", "mid", "senior"))
    form = c.one("form", ("full_time", "part_time", "contract"))
    low = 1000 * c.number("salary", 28, 70)
    high = low + 1000 * c.number("range", 4, 18)
    remote, years = c.yes("remote"), c.number("years", 1, 9)
    skills = c.some(
        "skills", ("Excel", "SQL", "forklift licence", "Dutch", "bookkeeping", "CAD drawing", "welding"), 2, 4
    )
    perks = c.some("perks", ("meal vouchers", "a bicycle allowance", "private health cover", "flexible hours"), 1, 3)
    where = f"You can work from home, though our office is in {town}." if remote else f"The work is on site in {town}."
    text = (
        f"{firm} is looking for a {level} {title} ({form.replace('_', ' ')}). {where} We ask for at least {years} "
        f"{'year' if years == 1 else 'years'} of experience and knowledge of {and_list(skills)}. The salary is between "
        f"{low:,} and {high:,} euros a year, and we offer {and_list(perks)}. Questions go to {contact}, extension "
        f"{c.number('extension', 100, 999)}."
    )
    levels, forms = enum("junior", "mid", "senior"), enum("full_time", "part_time", "contract")
    if variant:
        schema = obj(
            position=obj(title=TEXT, seniority=levels, employment=forms),
            employer=obj(name=TEXT, city=TEXT, remote_allowed=BOOLEAN),
            pay=obj(minimum=INTEGER, maximum=INTEGER, currency=enum("EUR", "USD", "GBP"), period=enum("hour", "year")),
            requirements=obj(years_of_experience=INTEGER, skills=listed(TEXT, minItems=1)),
            benefits=listed(TEXT),
        )
        answer = {
            "position": {"title": title, "seniority": level, "employment": form},
            "employer": {"name": firm, "city": town, "remote_allowed": remote},
            "pay": {"minimum": low, "maximum": high, "currency": "EUR", "period": "year"},
            "requirements": {"years_of_experience": years, "skills": skills},
            "benefits": perks,
        }
        return Record(text, schema, answer)
    schema = obj(
        job_title=TEXT,
        company=TEXT,
        location=obj(city=TEXT, remote=BOOLEAN),
        level=levels,
        contract_type=forms,
        salary=obj(min=INTEGER, max=INTEGER, currency=enum("EUR", "USD", "GBP")),
        min_years_experience=INTEGER,
        required_skills=listed(TEXT, minItems=1),
        contact_person=TEXT,
    )
    answer = {
        "job_title": title,
        "company": firm,
        "location": {"city": town, "remote": remote},
        "level": level,
        "contract_type": form,
        "salary": {"min": low, "max": high, "currency": "EUR"},
        "min_years_experience": years,
        "required_skills": skills,
        "contact_person": contact,
    }
    return Record(text, schema, answer)


def order(c: Choices, variant: int) -> Record:
    """An order in a customer's words."""
    goods = ("oak shelf", "desk lamp", "wool blanket", "ceramic bowl", "tool chest", "garden bench", "copper kettle")
    colours = ("white", "black", "green", "natural")
    chosen = c.some("goods", goods, 2, 3)
    items = [
        {
            "product": product,
            "quantity": c.number(f"quantity {product}", 1, 6),
            "color": c.one(f"colour {product}", colours),
            "unit_price": c.number(f"price {product}", 9, 240) + c.one(f"cents {product}", (0.5, 0.95, 0.25)),
        }
        for product in chosen
    ]
    name, street, town = c.person("customer"), c.one("street", STREETS), c.one("town", TOWNS)
    house, express, wrapped = c.number("house", 1, 180), c.yes("express"), c.yes("wrapped")
    payment = c.one("payment", ("card", "invoice", "bank_transfer"))
    number = f"{c.one('letter', 'KRT')}-{c.number('order', 10000, 99999)}"
    wanted = and_list(
        [f"{one['quantity']} x {one['product']} in {one['color']} at {one['unit_price']:.2f} each" for one in items]
    )
    text = (
        f"Hello, this is {name}. I would like to place order {number}: {wanted}. Please send it to {house} {street}, "
        f"{town}, by {'express' if express else 'standard'} delivery. I will pay by {payment.replace('_', ' ')}. "
        f"{'It is a present, so please wrap it.' if wrapped else 'No gift wrapping is needed.'} Thank you!"
    )
    line = obj(product=TEXT, quantity={"type": "integer", "minimum": 1}, color=enum(*colours), unit_price=NUMBER)
    methods = enum("card", "invoice", "bank_transfer")
    if variant:
        schema = obj(
            reference=TEXT,
            customer=obj(full_name=TEXT, address=obj(street=TEXT, house_number=INTEGER, town=TEXT)),
            lines=listed(line, minItems=1),
            delivery=obj(method=enum("standard", "express"), gift_wrap=BOOLEAN),
            payment_method=methods,
        )
        answer = {
            "reference": number,
            "customer": {"full_name": name, "address": {"street": street, "house_number": house, "town": town}},
            "lines": items,
            "delivery": {"method": "express" if express else "standard", "gift_wrap": wrapped},
            "payment_method": payment,
        }
        return Record(text, schema, answer)
    schema = obj(
        order_id=TEXT,
        buyer=TEXT,
        ship_to=obj(address=TEXT, city=TEXT),
        items=listed(line, minItems=1),
        shipping=enum("standard", "express"),
        payment=methods,
        is_gift=BOOLEAN,
    )
    answer = {
        "order_id": number,
        "buyer": name,
        "ship_to": {"address": f"{house} {street}", "city": town},
        "items": items,
        "shipping": "express" if express else "standard",
        "payment": payment,
        "is_gift": wrapped,
    }
    return Record(text, schema, answer)


def visit(c: Choices, variant: int) -> Record:
    """A clinic's note."""
    name, doctor, age = c.person("patient"), c.one("doctor", LAST), c.number("age", 19, 84)
    symptoms = c.some("symptoms", ("headache", "dry cough", "fever", "sore throat", "dizziness", "back pain"), 2, 4)
    drugs = c.some("drugs", ("Velotrin", "Corvaxan", "Mildofen", "Panturol"), 1, 2)
    doses = [
        {"name": drug, "dose_mg": c.number(f"dose {drug}", 1, 16) * 25, "times_per_day": c.number(drug, 1, 3)}
        for drug in drugs
    ]
    pulse, upper, lower = c.number("pulse", 58, 104), c.number("upper", 105, 155), c.number("lower", 62, 95)
    heat = c.number("heat", 362, 394) / 10
    urgency = c.one("urgency", ("routine", "soon", "urgent"))
    again, days, allergic = c.yes("again"), c.number("days", 3, 28), c.yes("allergic")
    often = ("once", "twice", "three times")
    given = and_list([f"{one['name']} {one['dose_mg']} mg {often[one['times_per_day'] - 1]} a day" for one in doses])
    text = (
        f"{name}, aged {age}, was seen by Dr {doctor} and reported {and_list(symptoms)}. Temperature {heat} degrees, "
        f"pulse {pulse}, blood pressure {upper} over {lower}. The case was rated {urgency}. The patient "
        f"{'has a penicillin allergy' if allergic else 'has no known allergies'}. Prescribed: {given}. "
        f"{f'A follow-up is due in {days} days.' if again else 'No follow-up is needed.'}"
    )
    drug = obj(name=TEXT, dose_mg=NUMBER, times_per_day=INTEGER)
    levels = enum("routine", "soon", "urgent")
    if variant:
        schema = obj(
            patient=obj(name=TEXT, age=INTEGER, has_allergies=BOOLEAN),
            physician=TEXT,
            symptoms=listed(TEXT, minItems=1),
            vital_signs=obj(
                temperature_c=NUMBER, pulse_bpm=INTEGER, blood_pressure=obj(systolic=INTEGER, diastolic=INTEGER)
            ),
            triage=levels,
            medication=listed(drug),
            follow_up={"anyOf": [obj(in_days=INTEGER), {"type": "null"}]},
        )
        answer = {
            "patient": {"name": name, "age": age, "has_allergies": allergic},
            "physician": doctor,
            "symptoms": symptoms,
            "vital_signs": {
                "temperature_c": heat,
                "pulse_bpm": pulse,
                "blood_pressure": {"systolic": upper, "diastolic": lower},
            },
            "triage": urgency,
            "medication": doses,
            "follow_up": {"in_days": days} if again else None,
        }
        return Record(text, schema, answer)
    schema = obj(
        patient_name=TEXT,
        age=INTEGER,
        complaints=listed(TEXT, minItems=1),
        measurements=obj(temperature=NUMBER, pulse=INTEGER, systolic=INTEGER, diastolic=INTEGER),
        urgency=levels,
        prescriptions=listed(drug),
        allergy_known=BOOLEAN,
        follow_up_needed=BOOLEAN,
    )
    answer = {
        "patient_name": name,
        "age": age,
        "complaints": symptoms,
        "measurements": {"temperature": heat, "pulse": pulse, "systolic": upper, "diastolic": lower},
        "urgency": urgency,
        "prescriptions": doses,
        "allergy_known": allergic,
        "follow_up_needed": again,
    }
    return Record(text, schema, answer)


def event(c: Choices, variant: int) -> Record:
    """An announcement."""
    kinds = ("concert", "lecture", "workshop", "market")
    kind = c.one("kind", kinds)
    theme = c.one(
        "theme", ("Rivers at Night", "Bread and Salt", "Small Machines", "The Winter Garden", "Maps of Sound")
    )
    venue = f"{c.one('house', ('Glass', 'Tanner', 'North', 'Copper'))} {c.one('hall', ('Hall', 'Pavilion', 'Theatre'))}"
    town, month, day = c.one("town", TOWNS), c.one("month", MONTHS), c.number("day", 1, 28)
    hour, minutes = c.number("hour", 9, 20), 15 * c.number("minutes", 3, 12)
    price, seats = c.number("price", 4, 38) + 0.5, 10 * c.number("seats", 4, 60)
    free_for_children, outdoors = c.yes("children"), c.yes("outdoors")
    speakers = [
        {"name": c.person(f"guest {n}"), "role": c.one(f"role {n}", ("host", "speaker", "musician"))}
        for n in range(c.number("guests", 1, 3))
    ]
    guests = and_list([f"{one['name']} ({one['role']})" for one in speakers])
    tags = c.some("tags", ("history", "music", "food", "craft", "science"), 1, 3)
    text = (
        f'The {kind} "{theme}" takes place {"outdoors at" if outdoors else "in"} {venue}, {town}, on {day} {month} '
        f"2031 at {hour:02d}:00 and lasts {minutes} minutes. There are {seats} seats at {price:.2f} euros"
        f"{', and children get in free' if free_for_children else ', with no reduction for children'}. Taking part: "
        f"{guests}. Filed under {and_list(tags)}."
    )
    person = obj(name=TEXT, role=enum("host", "speaker", "musician"))
    topic = enum("history", "music", "food", "craft", "science")
    date = f"2031-{MONTH_NUMBERS[month]:02d}-{day:02d}"
    if variant:
        schema = obj(
            title=TEXT,
            category=enum(*kinds),
            venue=obj(name=TEXT, city=TEXT, outdoor=BOOLEAN),
            schedule=obj(date={"type": "string", "format": "date"}, starts_at=TEXT, duration_minutes=INTEGER),
            tickets=obj(price=NUMBER, capacity=INTEGER, children_free=BOOLEAN),
            people=listed(person, minItems=1),
            topics=listed(topic, minItems=1),
        )
        answer = {
            "title": theme,
            "category": kind,
            "venue": {"name": venue, "city": town, "outdoor": outdoors},
            "schedule": {"date": date, "starts_at": f"{hour:02d}:00", "duration_minutes": minutes},
            "tickets": {"price": price, "capacity": seats, "children_free": free_for_children},
            "people": speakers,
            "topics": tags,
        }
        return Record(text, schema, answer)
    schema = obj(
        event_name=TEXT,
        event_type=enum(*kinds),
        place=obj(venue=TEXT, town=TEXT),
        date=obj(
            day={"type": "integer", "minimum": 1, "maximum": 31},
            month={"type": "integer", "minimum": 1, "maximum": 12},
            year=INTEGER,
        ),
        duration_minutes=INTEGER,
        ticket_price=NUMBER,
        free_for_children=BOOLEAN,
        participants=listed(person, minItems=1),
        tags=listed(topic, minItems=1),
    )
    answer = {
        "event_name": theme,
        "event_type": kind,
        "place": {"venue": venue, "town": town},
        "date": {"day": day, "month": MONTH_NUMBERS[month], "year": 2031},
        "duration_minutes": minutes,
        "ticket_price": price,
        "free_for_children": free_for_children,
        "participants": speakers,
        "tags": tags,
    }
    return Record(text, schema, answer)


def inspection(c: Choices, variant: int) -> Record:
    """A technician's report."""
    machines = ("boiler", "lift", "conveyor", "compressor")
    machine, maker = c.one("machine", machines), c.one("maker", FIRMS)
    serial = f"{c.one('prefix', ('AX', 'BR', 'QL'))}{c.number('serial', 1000, 9999)}"
    technician, site = c.person("technician"), c.one("site", TOWNS)
    hours, pressure = 10 * c.number("hours", 40, 900), c.number("pressure", 11, 88) / 10
    faults = [
        {"part": part, "severity": c.one(f"severity {part}", ("low", "medium", "high")), "repaired": c.yes(part)}
        for part in c.some("parts", ("door seal", "drive belt", "pressure valve", "control panel", "bearing"), 1, 3)
    ]
    result = c.one("result", ("passed", "passed_with_remarks", "failed"))
    sealed, months = c.yes("sealed"), c.one("months", (3, 6, 12))
    found = and_list(
        [f"{one['part']} ({one['severity']}, {'repaired' if one['repaired'] else 'not repaired'})" for one in faults]
    )
    text = (
        f"Technician {technician} checked the {machine} {serial} made by {maker} at the {site} site. It has run "
        f"{hours} hours, and the working pressure was {pressure} bar. Defects found: {found}. The inspection "
        f"{result.replace('_', ' ')}, the machine was {'sealed' if sealed else 'not sealed'}, and the next check "
        f"is due in {months} months."
    )
    defect = obj(part=TEXT, severity=enum("low", "medium", "high"), repaired=BOOLEAN)
    results = enum("passed", "passed_with_remarks", "failed")
    if variant:
        schema = obj(
            equipment=obj(type=enum(*machines), serial_number=TEXT, manufacturer=TEXT),
            inspector=obj(name=TEXT, site=TEXT),
            readings=obj(operating_hours=INTEGER, pressure_bar=NUMBER),
            defects=listed(defect),
            outcome=obj(result=results, sealed=BOOLEAN, next_check_months=INTEGER),
        )
        answer = {
            "equipment": {"type": machine, "serial_number": serial, "manufacturer": maker},
            "inspector": {"name": technician, "site": site},
            "readings": {"operating_hours": hours, "pressure_bar": pressure},
            "defects": faults,
            "outcome": {"result": result, "sealed": sealed, "next_check_months": months},
        }
        return Record(text, schema, answer)
    schema = obj(
        machine=obj(kind=enum(*machines), serial=TEXT),
        made_by=TEXT,
        location=TEXT,
        technician=TEXT,
        hours_run=INTEGER,
        pressure=NUMBER,
        findings=listed(defect),
        verdict=results,
        is_sealed=BOOLEAN,
        next_check=obj(value=INTEGER, unit=enum("weeks", "months", "years")),
    )
    answer = {
        "machine": {"kind": machine, "serial": serial},
        "made_by": maker,
        "location": site,
        "technician": technician,
        "hours_run": hours,
        "pressure": pressure,
        "findings": faults,
        "verdict": result,
        "is_sealed": sealed,
        "next_check": {"value": months, "unit": "months"},
    }
    return Record(text, schema, answer)


KINDS: tuple[tuple[str, Callable[[Choices, int], Record]], ...] = (
    ("job", job),
    ("order", order),
    ("visit", visit),
    ("event", event),
    ("inspection", inspection),
)
